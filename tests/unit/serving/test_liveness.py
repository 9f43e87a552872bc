# SPDX-License-Identifier: Apache-2.0
"""When a child process counts as standing still."""

import asyncio

import pytest

from pelton.serving.liveness import falls_silent


@pytest.mark.parametrize(
    ("heard", "num_looks"),
    [
        *(([0] * 50, None), ([1, 2, 3] * 20, None), ([0, 0, 1, 2], 11), ([1] * 7 + [2], 15)),
        ([0], 100),
    ],
    ids=["starts", "speaks", "silent", "silent-later", "never-starts"],
)
async def test_two_heartbeats_without_a_word_since_the_last_are_silence(
    heard: list[int], num_looks: int | None
) -> None:
    """`heard`: at each look, and then the same for ever or, for one that is not found silent, until
    its end."""
    exited, looks = asyncio.Event(), 0

    def num_heard() -> int:
        nonlocal looks
        looks += 1
        if num_looks is None and looks == len(heard):
            exited.set()
        return heard[min(looks, len(heard)) - 1]

    async with asyncio.timeout(10):
        is_silent = await falls_silent(exited, num_heard, 0.004, 0.0995)
    assert (is_silent, looks) == (num_looks is not None, num_looks or len(heard))
