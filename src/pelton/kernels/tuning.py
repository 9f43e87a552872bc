# SPDX-License-Identifier: Apache-2.0
"""Settings of kernels that were found by timing them on a card, where a rule is not enough.

A kernel's `tune` is its rule, marked `tunable`. `tuned.json` changes some of what the rule says for
the shapes that `scripts/tune_kernels.py` has timed, by compute capability, kernel and shape. A
shape is the rule's arguments; rows or tokens, which stand first, are rounded up to a power of two.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from pelton.kernels.triton_runtime import next_power_of_2

TABLE = Path(__file__).with_name("tuned.json")
Settings = Mapping[str, int]
Table = dict[str, dict[str, dict[str, int]]]
"""Kernel and shape to settings."""
S = TypeVar("S")


class Tunable(Generic[S]):
    """A rule whose answer the table may change. Its answers for the same shape are the same object:
    do not write to them."""

    def __init__(self, name: str, rule: Callable[..., S], *, has_rows: bool) -> None:
        self.name = name
        self.__doc__ = rule.__doc__
        self._rule = rule
        self._has_rows = has_rows
        self._known: dict[tuple[int, ...], S] = {}
        self._trial: Settings | None = None

    def __call__(self, *shape: int) -> S:
        found = self._known.get(shape)
        if found is None:
            changes = self._trial
            if changes is None:
                changes = read_table().get(self.name, {}).get(self._key(shape), {})
            found = self._known[shape] = _change(self._rule(*shape), changes)
        return found

    @contextmanager
    def trying(self, settings: Settings) -> Iterator[set[str]]:
        """Inside, the rule with these settings whatever the table says. Gives the shapes that were
        asked for, which are complete when it ends."""
        shapes: set[str] = set()
        self._trial = settings
        self._known.clear()
        yield shapes
        shapes.update(map(self._key, self._known))
        self._trial = None
        self._known.clear()

    def _key(self, shape: tuple[int, ...]) -> str:
        first = next_power_of_2(shape[0]) if self._has_rows else shape[0]
        return ",".join(map(str, (first, *shape[1:])))


def tunable(name: str, *, has_rows: bool = True) -> Callable[[Callable[..., S]], Tunable[S]]:
    return lambda rule: Tunable(name, rule, has_rows=has_rows)


def capability() -> str:
    """Of the current GPU: "9.0"; empty without one."""
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.get_device_capability()))


@cache
def read_table() -> Table:
    """The current GPU's part. It names only settings that its kernel's rule has."""
    tables: dict[str, Table] = json.loads(TABLE.read_text())
    return tables.get(capability(), {})


def _change(settings: S, changes: Settings) -> S:
    if not changes:
        return settings
    if isinstance(settings, dict):
        assert changes.keys() <= settings.keys(), (changes, settings)
        return type(settings)({**settings, **changes})
    changed: Any = settings
    return dataclasses.replace(changed, **changes)  # type: ignore[no-any-return]
