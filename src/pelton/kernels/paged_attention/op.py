# SPDX-License-Identifier: Apache-2.0
"""The public function for attention over the paged KV cache."""

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_meta, runs_native
from pelton.kernels.paged_attention.cost import paged_attention_cost
from pelton.kernels.paged_attention.gluon_fp8 import suits_decodes
from pelton.kernels.paged_attention.reference import paged_attention_reference
from pelton.kernels.paged_attention.triton_decode import decode_attention
from pelton.kernels.paged_attention.triton_invariant import invariant_attention
from pelton.kernels.paged_attention.triton_prefill import prefill_attention
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost


class PagedAttention(Protocol):
    def __call__(
        self,
        q: Float[Tensor, "T H K"],
        cache_layer: Float[Tensor, "P 2 S G K"],
        rows: AttentionRows,
        scale: float,
        window: int,
        sinks: Float[Tensor, " H"] | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Float[Tensor, "T H K"]: ...


def _paged_attention_meta(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    num_heads, head_dim = q.shape[1:]
    cost = paged_attention_cost(
        rows.bounds(q.shape[0]), num_heads, cache_layer.shape[3], head_dim, q.element_size(),
        cache_layer.element_size(), window,
    )  # fmt: skip
    log_cost("paged_attention", cost)
    return q.new_empty(q.shape)


def _paged_attention_triton(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_decodes = rows.num_decodes
    decodes = slice(0, num_decodes)
    if num_decodes > 0 and suits_decodes(q[decodes], cache_layer):
        invariant_attention(
            q, cache_layer, rows, decodes, decodes, 1, scale * k_scale, window, sinks, v_scale, out
        )
    elif num_decodes > 0:
        decode_attention(
            q[decodes],
            cache_layer,
            rows.block_tables,
            rows.context_lens[decodes],
            scale * k_scale,
            window,
            sinks,
            v_scale,
            out[decodes],
        )
    if rows.num_rows > num_decodes and q.shape[0] > num_decodes:
        prefill_attention(q, cache_layer, rows, scale * k_scale, window, sinks, v_scale, out)
    return out


def _paged_attention_invariant(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for part, tokens, query_len in rows.parts(q.shape[0]):
        invariant_attention(
            q, cache_layer, rows, part, tokens, query_len, scale * k_scale, window, sinks, v_scale,
            out,
        )  # fmt: skip
    return out


PAGED_ATTENTION: Dispatch[PagedAttention] = Dispatch(
    "paged_attention",
    Implementation("meta", on_meta, _paged_attention_meta),
    Implementation("triton", runs_triton, _paged_attention_triton, is_invariant=False),
    Implementation("invariant", runs_triton, _paged_attention_invariant),
    Implementation(
        "native", runs_native, "pelton.kernels.paged_attention.native:paged_attention_native"
    ),
    Implementation("reference", anywhere, paged_attention_reference),
)


def paged_attention(
    q: Float[Tensor, "T H K"],
    cache_layer: Float[Tensor, "P 2 S G K"],
    rows: AttentionRows,
    scale: float,
    window: int,
    sinks: Float[Tensor, " H"] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Float[Tensor, "T H K"]:
    """Causal attention of every new token over its row's context; the result is new memory.

    `window` counts the token itself; 0 means no limit. `sinks` are each head's logit without a
    value, in the softmax of every token; None: there are none. A cache in FP8 holds keys over
    `k_scale` and values over `v_scale`; they are 1 for any other.
    """
    is_fp8 = cache_layer.dtype is torch.float8_e4m3fn
    assert is_fp8 or k_scale == v_scale == 1.0, (cache_layer.dtype, k_scale, v_scale)
    assert q.shape[1] % cache_layer.shape[3] == 0, (q.shape, cache_layer.shape)
    assert q.stride(2) == cache_layer.stride(4) == 1, (q.stride(), cache_layer.stride())
    run = PAGED_ATTENTION.select(q.device, q.dtype)
    return run(q, cache_layer, rows, scale, window, sinks, k_scale, v_scale)
