# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: a small explicit table, first match wins.

Each op's file ends with its table and its public function. A table is read from top to bottom
once for each (device, dtype) that is met and then remembered, so a call pays one dictionary
lookup. `reference` is in every table and selectable by name.

Within `batch_invariant()` a table offers only the implementations under which a row's result is the
same bits whatever rows stand beside it: this is the one place that knows of `--deterministic`.
"""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

Requirement = Callable[[torch.device, torch.dtype], bool]
"""Whether an implementation can take tensors of this device and number format."""


def anywhere(device: torch.device, dtype: torch.dtype) -> bool:
    return True


def on_meta(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "meta"


def on_cpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


@cache
def has_native_kernels() -> bool:
    """Whether `kernels.native` can run: there is Numba, and GNU OpenMP for its threads."""
    if sys.platform != "linux" or importlib.util.find_spec("numba") is None:
        return False
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    return True


def runs_native(device: torch.device, dtype: torch.dtype) -> bool:
    return on_cpu(device, dtype) and has_native_kernels()


@dataclass(frozen=True, slots=True)
class Implementation(Generic[Function]):
    name: str
    requirement: Requirement
    function: Function | str
    """Or "module:name", imported when it is first chosen: what only some machines have."""
    is_invariant: bool = True
    """Whether the bits of a row's result depend on that row alone: not on how many rows there are,
    and so neither on a library's choice of kernel nor on splits of a sum. Said of what a card runs:
    `--deterministic` is refused elsewhere."""

    def load(self) -> Function:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        return cast(Function, getattr(importlib.import_module(module), name))


class Dispatch(Generic[Function]):
    """The implementations of one op. All take the arguments of the op's public function."""

    def __init__(self, op: str, *implementations: Implementation[Function]) -> None:
        self.op = op
        self._implementations = implementations
        self._forced: str | None = None
        self._chosen: dict[tuple[torch.device, torch.dtype, bool], Function] = {}
        _TABLES[op] = self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self._implementations)

    def select(self, device: torch.device, dtype: torch.dtype) -> Function:
        return observed(self.op, self.choose(device, dtype))

    def choose(self, device: torch.device, dtype: torch.dtype) -> Function:
        """As `select`, unseen by observers: for an op that is made of others."""
        place = device, dtype, _must_be_invariant.get()
        function = self._chosen.get(place)
        if function is None:
            function = self._chosen[place] = self._first_match(*place)
        return function

    def named(self, name: str) -> Function:
        """The implementation called `name`, whatever its requirement says."""
        for item in self._implementations:
            if item.name == name:
                return item.load()
        raise ValueError(f"{self.op} has no implementation {name!r}, only {', '.join(self.names)}.")

    def _first_match(self, device: torch.device, dtype: torch.dtype, invariant: bool) -> Function:
        if self._forced is not None and device.type != "meta":
            return self.named(self._forced)
        for item in self._implementations:
            if item.requirement(device, dtype) and (item.is_invariant or not invariant):
                return item.load()
        raise ValueError(f"{self.op} has no implementation for {dtype} on {device}.")

    def _force(self, name: str | None) -> None:
        if name is not None:
            self.named(name)
        self._forced = name
        self._chosen.clear()


_must_be_invariant: ContextVar[bool] = ContextVar("must_be_invariant", default=False)


@contextmanager
def batch_invariant(*, wanted: bool = True) -> Iterator[None]:
    """Ops called in here run batch-invariant implementations alone. Of this thread only."""
    before = _must_be_invariant.set(wanted)
    try:
        yield
    finally:
        _must_be_invariant.reset(before)


def must_be_invariant() -> bool:
    """For what chooses between ops, or the sizes of their tiles, by the number of rows."""
    return _must_be_invariant.get()


_TABLES: dict[str, Dispatch[Any]] = {}


def registered_ops() -> dict[str, Dispatch[Any]]:
    """Of all modules imported so far, by name."""
    return dict(_TABLES)


Observer = Callable[[str, Callable[..., Any]], Any]
"""From an op's name and what would run to what runs instead."""
_observer: Observer | None = None


def observed(op: str, function: Function) -> Function:
    """`function`, or what an observer of `op` puts in its place. For what computes an op outside
    its table."""
    return function if _observer is None else cast(Function, _observer(op, function))


@contextmanager
def observed_ops(observer: Observer) -> Iterator[None]:
    """Every call of an op goes through `observer`: for timing them one by one. Process-wide, so not
    while an engine runs in another thread."""
    global _observer
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@contextmanager
def forced_implementation(name: str, *ops: str) -> Iterator[None]:
    """Runs `ops` (none given: every op imported so far) through the implementation `name`.

    For comparisons and bisecting; process-wide, so not while an engine runs in another thread.
    """
    tables = [_TABLES[op] for op in ops or _TABLES]
    for table in tables:
        table.named(name)
    for table in tables:
        table._force(name)
    try:
        yield
    finally:
        for table in tables:
            table._force(None)
