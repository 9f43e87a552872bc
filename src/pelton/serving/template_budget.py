# SPDX-License-Identifier: Apache-2.0
"""What one rendering of a chat template may use: steps, text written, and work on the way.

Whatever a template can make grow is counted before it is made. Going beyond is a `TemplateError`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jinja2

MAX_STEPS = 250_000
"""Loop rounds and calls of one rendering."""
MAX_CHARS = 64 * 2**20
"""Of all text one rendering writes, and of any one text built on the way."""
MAX_WORK = 4 * MAX_CHARS
"""Characters, and list items at their weight, that one rendering builds or looks through."""
ITEM_WORK = 16
"""An item of a list takes as much time and memory as so many characters."""
MAX_CPU_S = 0.5
"""Computing time of one rendering, looked at every so many steps."""
_STEPS_A_TURN = 64


@dataclass(slots=True)
class _Spent:
    """What one rendering used so far."""

    num_steps: int = 0
    num_chars: int = 0
    """Written."""
    work: int = 0
    num_checks: int = 0
    cpu_end_s: float = 0.0


_spent: ContextVar[_Spent] = ContextVar("_spent")


@contextmanager
def budget() -> Iterator[None]:
    """A new budget for what is rendered inside."""
    token = _spent.set(_Spent(cpu_end_s=time.thread_time() + MAX_CPU_S))
    try:
        yield
    finally:
        _spent.reset(token)


def count_work(size: int) -> None:
    """Before `size` characters or items are built or looked through at once."""
    if size > MAX_CHARS:
        raise jinja2.TemplateError(f"it builds a text of more than {MAX_CHARS} characters.")
    spent = _spent.get()
    spent.work += size
    if spent.work > MAX_WORK:
        raise jinja2.TemplateError(f"it works on more than {MAX_WORK} characters.")


def count_steps(num_steps: int = 1) -> None:
    spent = _spent.get()
    spent.num_steps += num_steps
    if spent.num_steps > MAX_STEPS:
        raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps.")
    spent.num_checks += 1
    if spent.num_checks % _STEPS_A_TURN == 0:
        if time.thread_time() > spent.cpu_end_s:
            raise jinja2.TemplateError(f"it takes more than {MAX_CPU_S:g} s of computing.")
        time.sleep(0)  # on a thread: lets the event loop have the interpreter


def count_output(value: Any) -> Any:
    """Called by jinja with the value of each expression that is written out."""
    spent = _spent.get()
    spent.num_chars += text_size(value)
    if spent.num_chars > MAX_CHARS:
        raise jinja2.TemplateError(f"it writes more than {MAX_CHARS} characters.")
    return str(value)


def count_operand(value: Any) -> Any:
    """Counts what a comparison or a slice looks through."""
    count_work(shallow_size(value))
    return value


def shallow_size(value: Any) -> int:
    """What it takes to copy `value` or to look through it, not into its items."""
    if isinstance(value, str):
        return len(value)
    is_sized = isinstance(value, (list, tuple, dict, range))
    return ITEM_WORK * len(value) if is_sized else ITEM_WORK


def text_size(value: Any, indent: int = 0, depth: int = 1) -> int:
    """About how long `str(value)` is, or its JSON with `indent`. One list may occur many times in
    another and make a text far larger than memory, so each occurrence is a step."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        items: Iterable[Any] = chain(value.keys(), value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    else:
        return 8
    count_steps()
    count_work(ITEM_WORK * len(value))
    return 2 + sum(text_size(item, indent, depth + 1) + 4 + indent * depth for item in items)


def counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        count_steps()
        yield item
