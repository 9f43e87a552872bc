# SPDX-License-Identifier: Apache-2.0
"""The public function for absorbed latent attention over the paged cache."""

from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import AttentionRows
from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.mla.cost import latent_attention_cost
from pelton.kernels.mla.cpu import latent_attention_cpu
from pelton.kernels.mla.hopper import hopper_latent_rows, suits_hopper_latent
from pelton.kernels.mla.reference import latent_attention_reference
from pelton.kernels.mla.triton import Tune, latent_attention_rows, tune, tune_invariant
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost


class LatentAttention(Protocol):
    def __call__(
        self,
        q_latent: Float[Tensor, "T H L"],
        q_rope: Float[Tensor, "T H R"],
        cache_layer: Float[Tensor, "P S L+R"],
        rows: AttentionRows,
        scale: float,
    ) -> Float[Tensor, "T H L"]: ...


def _latent_attention_meta(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    num_heads, latent_rank = q_latent.shape[1:]
    cost = latent_attention_cost(
        rows.bounds(q_latent.shape[0]),
        num_heads,
        latent_rank,
        q_rope.shape[2],
        q_latent.element_size(),
    )
    log_cost("latent_attention", cost)
    return q_latent.new_empty(q_latent.shape)


def _latent_attention_triton(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    return _launch(q_latent, q_rope, cache_layer, rows, scale, tune, may_split=True)


def _latent_attention_invariant(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    return _launch(q_latent, q_rope, cache_layer, rows, scale, tune_invariant, may_split=False)


def _launch(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
    tune: Tune,
    *,
    may_split: bool,
) -> Float[Tensor, "T H L"]:
    """On Hopper with a kernel of its own for the shapes that it takes."""
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    launch = partial(latent_attention_rows, tune=tune)
    if suits_hopper_latent(q_latent, q_rope, cache_layer):
        launch = partial(hopper_latent_rows, may_split=may_split)
    for part, tokens, query_len in rows.parts(q_latent.shape[0]):
        launch(q_latent, q_rope, cache_layer, rows, part, tokens, query_len, scale, out)
    return out


LATENT_ATTENTION: Dispatch[LatentAttention] = Dispatch(
    "latent_attention",
    Implementation("meta", on_meta, _latent_attention_meta),
    Implementation("triton", runs_triton, _latent_attention_triton, is_invariant=False),
    Implementation("invariant", runs_triton, _latent_attention_invariant),
    Implementation("cpu", on_cpu, latent_attention_cpu),
    Implementation("reference", anywhere, latent_attention_reference),
)


def latent_attention(
    q_latent: Float[Tensor, "T H L"],
    q_rope: Float[Tensor, "T H R"],
    cache_layer: Float[Tensor, "P S L+R"],
    rows: AttentionRows,
    scale: float,
) -> Float[Tensor, "T H L"]:
    """For each head of every new token: the sum of latents its scores weigh; new memory."""
    assert q_latent.shape[2] + q_rope.shape[2] == cache_layer.shape[2], (
        q_latent.shape, q_rope.shape, cache_layer.shape,
    )  # fmt: skip
    assert q_latent.stride(2) == q_rope.stride(2) == cache_layer.stride(2) == 1
    run = LATENT_ATTENTION.select(q_latent.device, q_latent.dtype)
    return run(q_latent, q_rope, cache_layer, rows, scale)
