# SPDX-License-Identifier: Apache-2.0
"""What drawing one token a row must do."""

from pelton.perf.cost import OpCost


def draw_tokens_cost(num_rows: int, vocab_size: int, element_bytes: int) -> OpCost:
    """Each logit is read once and weighed: a difference, a scaling and a power of two, about 16
    operations. Where the kept tokens end is found in further passes, which a cache may serve."""
    elements = num_rows * vocab_size
    return OpCost(16 * elements, elements * element_bytes + 32 * num_rows)
