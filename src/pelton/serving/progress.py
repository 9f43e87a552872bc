# SPDX-License-Identifier: Apache-2.0
"""A progress bar for a batch of requests: how many are done, and output tokens per second."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(num_requests: int, *, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function that takes the requests that were finished and the tokens that were made
    since the last call. The bar is drawn on stderr."""
    if not is_shown:
        yield lambda num_done, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("generating", total=num_requests, rate=0.0)
        start_s = time.monotonic()
        total_tokens = 0

        def advance(num_done: int, num_tokens: int) -> None:
            nonlocal total_tokens
            total_tokens += num_tokens
            elapsed_s = max(time.monotonic() - start_s, 1e-9)
            bar.update(task, advance=num_done, rate=total_tokens / elapsed_s)

        yield advance
