# SPDX-License-Identifier: Apache-2.0
"""Draws one token a row; see `reference` for what is drawn."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.draw_tokens.cost import draw_tokens_cost
from pelton.kernels.draw_tokens.reference import RandomRows, draw_tokens_reference
from pelton.kernels.draw_tokens.triton import draw_tokens_triton
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost

DrawTokens = Callable[[Tensor, Tensor, RandomRows], Tensor]

_MOST_TOKENS = 2**22
"""The weights of a row, each at most 2^40, must add up in 63 bits."""


def _draw_tokens_meta(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    num_rows = rows.rows.shape[0]
    log_cost("draw_tokens", draw_tokens_cost(num_rows, logits.shape[1], logits.element_size()))
    return torch.empty(num_rows, dtype=torch.int32, device=logits.device)


DRAW_TOKENS: Dispatch[DrawTokens] = Dispatch(
    "draw_tokens",
    Implementation("meta", on_meta, _draw_tokens_meta),
    Implementation("triton", runs_triton, draw_tokens_triton),
    Implementation("native", runs_native, "pelton.kernels.native.draw_tokens:draw_tokens"),
    Implementation("reference", anywhere, draw_tokens_reference),
)


def draw_tokens(
    logits: Float[Tensor, "N V"], highest_ids: Int[Tensor, " N"], rows: RandomRows
) -> Int[Tensor, " n"]:
    """Token ids (int32) of `rows`. `highest_ids` (int32) name the highest logit of every row, as
    `highest_logit` finds it. Rows of logits may be strided. A row that is not finite gets an id
    without meaning."""
    assert logits.stride(1) == 1, logits.stride()
    assert 0 < logits.shape[1] <= _MOST_TOKENS, logits.shape
    assert rows.rows.dtype == torch.int64, rows.rows.dtype
    assert highest_ids.shape == logits.shape[:1], (highest_ids.shape, logits.shape)
    return DRAW_TOKENS.select(logits.device, logits.dtype)(logits, highest_ids, rows)
