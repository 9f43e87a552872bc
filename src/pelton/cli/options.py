# SPDX-License-Identifier: Apache-2.0
"""Turns nodes of the configuration tree into command-line options, so that none is written twice.

A command declares the nodes it takes and receives them built and checked:

    @with_settings(EngineConfig, ServerConfig)
    def serve(settings: Settings) -> None: ...

A node that holds nodes contributes their fields; `--max-num-requests` sets the field
`max_num_requests` wherever it lives. `ModelConfig.model` is the argument MODEL. Every error a user
can cause leaves with one sentence on stderr and exit code 2.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from pelton.core.config import AUTO, Auto, Node
from pelton.core.errors import ConfigError, InvalidRequestError

NodeT = TypeVar("NodeT", bound=Node)
_SIZE_SUFFIXES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Settings:
    """The nodes of one command, by class."""

    def __init__(self, nodes: dict[type[Node], Node]) -> None:
        self._nodes = nodes

    def __getitem__(self, node_class: type[NodeT]) -> NodeT:
        node = self._nodes[node_class]
        assert isinstance(node, node_class), node
        return node


def with_settings(
    *node_classes: type[Node], defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replaces a command's parameter `settings` by one option for every field of `node_classes`.

    `defaults` replaces the default of fields, by name, for this command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        fields = [item for node in node_classes for item in _leaf_fields(node)]
        generated = [_make_parameter(node, item) for node, item in fields]
        generated = [
            item.replace(default=(defaults or {}).get(item.name, item.default))
            for item in generated
        ]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            with user_errors():
                nodes = {node: _build(node, values) for node in node_classes}
                kept = {parameter.name: values[parameter.name] for parameter in own}
                command(settings=Settings(nodes), **kept)

        parameters = sorted(own + generated, key=lambda item: not _is_argument(item))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        return run

    return decorate


class user_errors:
    """Turns errors that the user can mend into one sentence on stderr and exit code 2."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if isinstance(error, (ConfigError, InvalidRequestError)):
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(2)
        # What the machine refuses, such as a full disk. A reader that has left is typer's to end.
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            _abandon_output()
            typer.echo(f"error: {error}; see that there is room and permission for it.", err=True)
            raise typer.Exit(2)


def _abandon_output() -> None:
    """Drops what stdout still holds: writing it again at exit would only fail again."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 1)


def _leaf_fields(node: type[Node]) -> Iterator[tuple[type[Node], dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(node)
    for item in dataclasses.fields(node):
        if isinstance(hints[item.name], type) and issubclass(hints[item.name], Node):
            yield from _leaf_fields(hints[item.name])
        else:
            yield node, item


def _build(node: type[NodeT], values: dict[str, Any]) -> NodeT:
    hints = typing.get_type_hints(node)
    arguments = {}
    for item in dataclasses.fields(node):
        hint = hints[item.name]
        if isinstance(hint, type) and issubclass(hint, Node):
            arguments[item.name] = _build(hint, values)
        else:
            arguments[item.name] = values[item.name]
    return node(**arguments)


def _is_argument(parameter: inspect.Parameter) -> bool:
    metadata = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(item, typer.models.ArgumentInfo) for item in metadata)


def _make_parameter(node: type[Node], item: dataclasses.Field[Any]) -> inspect.Parameter:
    hint = typing.get_type_hints(node)[item.name]
    help_text = item.metadata["help"].replace("[", r"\[")  # no markup of rich's: 'pelton[kv]'
    if item.name == "model":
        info: Any = typer.Argument(help=help_text, metavar="MODEL")
        annotation: Any = Annotated[str, info]
    else:
        value_type, parse, metavar = _option_type(item.name, hint)
        flag = "--" + item.name.replace("_", "-")
        flags = f"{flag}/--no-{flag[2:]}" if value_type is bool else flag
        info = typer.Option(flags, help=help_text, parser=parse, metavar=metavar)
        annotation = Annotated[value_type, info]
    return inspect.Parameter(
        item.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=item.default,
        annotation=annotation,
    )


def _option_type(name: str, hint: Any) -> tuple[Any, Callable[[Any], Any] | None, str | None]:
    """The type that typer sees, a parser where typer's own does not do, and what help shows."""
    is_size = name.endswith("_bytes")
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return str, functools.partial(_parse_choice, choices), "|".join(choices)
    if get_origin(hint) in (Union, types.UnionType):
        inner = next(option for option in get_args(hint) if option is not Auto)
        parse = functools.partial(_parse_auto, _parse_size if is_size else inner)
        return str, parse, "auto|on|off" if inner is bool else "auto|" + _metavar(inner, is_size)
    if is_size:
        return str, _parse_size, _metavar(int, is_size)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint, None, "|".join(member.value for member in hint)
    return hint, None, None


def _metavar(value_type: type, is_size: bool) -> str:
    return "SIZE" if is_size else value_type.__name__.upper()


def _parse_choice(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(choices)}.")
    return text


def _parse_auto(inner: Callable[[str], Any], text: Any) -> Any:
    if isinstance(text, Auto) or text == "auto":
        return AUTO
    if inner is bool:
        return _parse_choice(("on", "off"), text) == "on"
    try:
        return inner(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'auto'.") from None


def _parse_size(text: Any) -> int:
    """Bytes from "2GiB", "512MiB" or a plain number."""
    if isinstance(text, int):
        return text
    factor = 1
    number = text.strip()
    for suffix, size in _SIZE_SUFFIXES.items():
        if number.endswith(suffix):
            number, factor = number.removesuffix(suffix), size
    try:
        return int(float(number) * factor)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size such as 2GiB or 512MiB.") from None
