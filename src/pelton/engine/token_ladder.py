# SPDX-License-Identifier: Apache-2.0
"""The step sizes that a CPU runs.

oneDNN compiles a product anew for every number of rows and keeps what it compiled, half a megabyte
for each product: with steps of any size that adds up to a gigabyte, and a step of a new size waits.
So steps are padded to the next of a few dozen sizes.
"""


def token_ladder(max_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, then four steps to each doubling; `max_tokens` is the last."""
    sizes = {1, 2, 4, 8, 16, max_tokens}
    octave = 16
    while octave < max_tokens:
        sizes |= {octave * quarter // 4 for quarter in range(4, 8)}
        octave *= 2
    return tuple(sorted(size for size in sizes if size <= max_tokens))
