# SPDX-License-Identifier: Apache-2.0
"""Chat messages to the prompt text a model was trained on, by its jinja template.

Templates come from checkpoints and requests, so they run in jinja's sandbox and under a budget:
loop rounds, calls, and the text they build are bounded, and exceeding it is an error of that
request alone. The environment offers what Hugging Face's does: `tojson`, `raise_exception`,
`strftime_now`, loop controls, and the `generation` tag, which marks text and adds none.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pelton.core.errors import InvalidRequestError

MAX_STEPS = 250_000
"""Loop rounds and calls of one rendering."""
MAX_CHARS = 64 * 2**20
"""Of all text one rendering writes, and of any one text built on the way."""
MAX_BITS = 1 << 16
"""Bound on the size of an integer power, and on the product of the sizes of two factors."""
CACHED_TEMPLATES = 64

_WIDE = re.compile(r"\d{6}|%[^a-zA-Z%]*\*|\{[^}]*\{")


@dataclass(slots=True)
class _Spent:
    """What one rendering used so far."""

    num_steps: int = 0
    num_chars: int = 0


_spent: ContextVar[_Spent] = ContextVar("_spent")


class ChatTemplate:
    """`source` None: the model has no template, and `render` needs one from the request."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text, special tokens written out: encode it without adding more.

        `template` replaces the model's own; `variables` are passed on to it. Raises
        `InvalidRequestError` for messages the template refuses or cannot render.
        """
        source = template or self.source
        if source is None:
            raise InvalidRequestError(
                "This model has no chat template: pass one as chat_template, or use "
                "/v1/completions.",
                param="messages",
            )
        if not messages:
            raise InvalidRequestError("messages must not be empty.", param="messages")
        param = "chat_template" if template else "messages"
        values = {
            **self._special_tokens,
            **variables,
            "messages": [_with_text_content(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        token = _spent.set(_Spent())
        try:
            return _compile(source).render(values)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequestError(
                f"The chat template is broken in line {error.lineno}: {error.message}.",
                param="chat_template",
            ) from error
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequestError(
                f"The chat template cannot render these messages: {error or type(error).__name__}",
                param=param,
            ) from error
        finally:
            _spent.reset(token)


# What an expression on values of unexpected kinds can raise, besides jinja's own errors.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


def _with_text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given as text parts becomes one string, which every template can take."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts = []
    for part in content:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                "Parts of a message's content must be of type 'text' for this model.",
                param="messages",
            )
        texts.append(part["text"])
    return {**message, "content": "\n".join(texts)}


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise jinja2.TemplateError(f"it builds a text of more than {MAX_CHARS} characters.")


def _count_steps(num_steps: int = 1) -> None:
    spent = _spent.get()
    spent.num_steps += num_steps
    if spent.num_steps > MAX_STEPS:
        raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps.")


def _count_output(value: Any) -> Any:
    """Called by jinja with the value of each expression that is written out."""
    text = str(value)
    spent = _spent.get()
    spent.num_chars += len(text)
    _check_size(spent.num_chars)
    return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop round and call counted and repetition bounded."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]  # the same tree

    def count_rounds(self, items: Any) -> Any:
        # Sized items stay what they are, so that `loop.length` and mappings work as written.
        if isinstance(items, (str, list, tuple, dict, range)):
            _count_steps(len(items))
            return items
        return items if isinstance(items, jinja2.Undefined) else _counted(items)

    def concatenate(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        owner = getattr(value, "__self__", None)
        if isinstance(owner, str) and value.__name__ in ("format", "format_map"):
            _check_format(owner)
        return super().wrap_str_format(value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count_steps()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, function.__name__, args)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            growth = abs(right) if operator == "**" else right.bit_length()
            if left.bit_length() * growth > MAX_BITS:
                raise jinja2.TemplateError("it computes with huge numbers.")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(times, int):
                    _check_size(len(sized) * times)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            _check_size(len(left) + (len(right) if isinstance(right, type(left)) else 0))
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _count_steps()
        yield item


class _Guards(NodeTransformer):
    """Routes loops and the ~ operator through the environment, which counts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        count_rounds = nodes.EnvironmentAttribute("count_rounds")
        node.iter = nodes.Call(count_rounds, [node.iter], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        concatenate = nodes.EnvironmentAttribute("concatenate")
        return nodes.Call(concatenate, node.nodes, [], None, None)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: its content, as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares a set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes <, > and & for HTML, which prompts do not want.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _bounded(filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose result grows with a number the template names."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        for size in (*args, *kwargs.values()):
            if isinstance(size, int):
                _check_size(size)
        return filter(value, *args, **kwargs)

    return checked


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return value % (kwargs or args)


def _check_format(text: str) -> None:
    """Widths and precisions that would build huge texts."""
    if _WIDE.search(text):
        raise jinja2.TemplateError("it formats text with a width of six digits or more, or with *.")


def _check_method(text: str, name: str, args: Sequence[Any]) -> None:
    """Methods of a text whose result can be far longer than the text."""
    if name == "replace" and len(args) > 1 and isinstance(args[1], str):
        _check_size(len(text) + text.count(str(args[0])) * len(args[1]))
    elif name in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        for size in args:
            if isinstance(size, int):
                _check_size(size * (1 + text.count("\t")))


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_count_output,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.filters["format"] = _format
    for name in ("center", "indent", "batch", "slice", "round"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _make_environment()


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source)
