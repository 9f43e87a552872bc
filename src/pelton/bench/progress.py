# SPDX-License-Identifier: Apache-2.0
"""What the user sees while a measurement runs: phases, then a bar with rate and time left."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pelton.bench import load_messages

_RATE_WINDOW_S = 3.0


class ProgressView:
    """Draws on a terminal; elsewhere it prints one line a phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._history: list[tuple[float, int]] = []

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def start_phase(self, name: str, *, total: int | None = None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._history = []
        self._task = self._progress.add_task(name, total=total, detail="")
        if not self._console.is_terminal:
            self._console.print(f"{name} ...")

    def note(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False)

    def show(self, progress: load_messages.Progress) -> None:
        if self._task is None:
            return
        detail = (
            f"{progress.num_issued - progress.num_completed} in flight · "
            f"{self._tokens_per_s(progress.num_output_tokens):,.0f} tokens/s"
        )
        if progress.num_failed:
            detail += f" · [red]{progress.num_failed} failed[/red]"
        self._progress.update(self._task, completed=progress.num_completed, detail=detail)

    def _tokens_per_s(self, num_tokens: int) -> float:
        now_s = time.monotonic()
        self._history.append((now_s, num_tokens))
        self._history = [item for item in self._history if now_s - item[0] <= _RATE_WINDOW_S]
        first_s, first_tokens = self._history[0]
        return (num_tokens - first_tokens) / (now_s - first_s) if now_s > first_s else 0.0
