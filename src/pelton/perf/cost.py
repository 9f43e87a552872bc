# SPDX-License-Identifier: Apache-2.0
"""What an operation must do: arithmetic and memory traffic, on plain integers.

Each op in `kernels` has a formula that returns an `OpCost`. Running a model on `meta` tensors
inside `record_costs()` collects them, so that the model's code is also its cost model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OpCost:
    """A lower bound: each input read once, each output written once."""

    flops: int
    """Floating-point operations; a multiply-add counts two."""
    bytes: int
    """Bytes moved through device memory."""

    def __add__(self, other: "OpCost") -> "OpCost":
        return OpCost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(slots=True)
class CostLog:
    entries: list[tuple[str, OpCost]] = field(default_factory=list)
    """(op name, its cost) in the order the ops ran."""

    @property
    def total(self) -> OpCost:
        return sum((cost for _, cost in self.entries), start=OpCost(0, 0))


_active_log: ContextVar[CostLog | None] = ContextVar("active_cost_log", default=None)


@contextmanager
def record_costs() -> Iterator[CostLog]:
    """Collects the costs of ops that run on `meta` tensors in this context."""
    log = CostLog()
    token = _active_log.set(log)
    try:
        yield log
    finally:
        _active_log.reset(token)


def log_cost(op: str, cost: OpCost) -> None:
    """Adds to the log of the surrounding `record_costs()`; without one, nothing happens."""
    log = _active_log.get()
    if log is not None:
        log.entries.append((op, cost))


def matmul_cost(
    rows: int, inner: int, columns: int, element_bytes: int, out_element_bytes: int
) -> OpCost:
    """A [rows, inner] by [inner, columns] product."""
    num_bytes = (rows + columns) * inner * element_bytes + rows * columns * out_element_bytes
    return OpCost(2 * rows * inner * columns, num_bytes)
