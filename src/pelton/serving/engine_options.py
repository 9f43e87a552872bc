# SPDX-License-Identifier: Apache-2.0
"""Keyword arguments to a configuration tree: `dtype="float32"` sets `model.dtype`, and so on.

A setting has one name wherever it lives in the tree, so its node need not be named.
"""

import dataclasses
import typing
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pelton.core.config import AUTO, Auto, EngineConfig, Node
from pelton.core.errors import ConfigError


def make_engine_config(model: str, **options: Any) -> EngineConfig:
    """Raises `ConfigError` for an unknown name (listing the known ones) or a wrong value."""
    options["model"] = model
    nodes: dict[str, Node] = {}
    known = []
    for name, node_class in typing.get_type_hints(EngineConfig).items():
        hints = typing.get_type_hints(node_class)
        known += [item.name for item in dataclasses.fields(node_class)]
        given = {
            item.name: _convert(item.name, options.pop(item.name), hints[item.name])
            for item in dataclasses.fields(node_class)
            if item.name in options
        }
        nodes[name] = node_class(**given)
    if options:
        raise ConfigError(
            f"There is no setting {', '.join(sorted(options))}; the settings are "
            f"{', '.join(sorted(known))}."
        )
    return EngineConfig(**nodes)  # type: ignore[arg-type]


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Enum members and AUTO may be given by their text; everything else has its own type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if Auto in kinds and value == "auto":
        return AUTO
    for kind in kinds:
        if issubclass(kind, Enum):
            if value in [member.value for member in kind]:
                return kind(value)
        elif _is_instance(value, kind):
            return value
    raise ConfigError(f"{name} must be {' or '.join(map(_allowed, kinds))}, got {value!r}.")


def _is_instance(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _allowed(kind: type) -> str:
    if issubclass(kind, Enum):
        return " or ".join(repr(member.value) for member in kind)
    return {bool: "True or False", int: "an integer", float: "a number"}.get(kind, "a string")
