# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values that were made from latents: the un-absorbed form, for prefill.

A head's key is (k, r): k of its own and a rotated r that all heads share; a query is (q_nope,
q_rope), and scores are scale * (q_nope . k + q_rope . r). Keys may come in several calls. What a
call leaves of a query is the weighted mean of values `out` and the logarithm of the weights' sum
`lse`; with that of other keys it is merged exactly:

    lse' = log(e^lse_a + e^lse_b)        out' = e^(lse_a - lse') out_a + e^(lse_b - lse') out_b

(Dao et al., "Flash-Decoding", 2023). A query that has seen no key has lse = -inf and out = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pelton.kernels.dispatch import Dispatch, Implementation, anywhere, on_cpu, on_meta
from pelton.kernels.mla.cost import latent_prefill_cost
from pelton.kernels.mla.triton_prefill import launch_latent_prefill
from pelton.kernels.triton_runtime import runs_triton
from pelton.perf.cost import log_cost

_CPU_TILE = 128
"""Queries whose scores are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Spans:
    """n pairs of a run of queries and the run of keys that they see, no query in two of them:
    (first query, number of queries, first key, number of keys), on the host and on the device.
    Those with the most queries should stand in front: they start first."""

    host: tuple[tuple[int, int, int, int], ...]
    device: Int[Tensor, "n 4"]


@dataclass(frozen=True, slots=True)
class PrefillInputs:
    """The last axis of each is contiguous; keys and values in no span may hold anything."""

    q_nope: Float[Tensor, "T H K"]
    q_rope: Float[Tensor, "T H R"]
    keys: Float[Tensor, "N H K"]
    rope_keys: Float[Tensor, "N R"]
    values: Float[Tensor, "N H V"]
    spans: Spans
    scale: float
    is_causal: bool
    """A span's last query sees all of its keys, each query before it one key less."""

    def __post_init__(self) -> None:
        assert self.q_nope.shape[1:] == self.keys.shape[1:], (self.q_nope.shape, self.keys.shape)
        assert self.q_rope.shape[2] == self.rope_keys.shape[1], self.rope_keys.shape
        for tensor in (self.q_nope, self.q_rope, self.keys, self.rope_keys, self.values):
            assert tensor.stride(-1) == 1, tensor.stride()


def latent_prefill_reference(
    inputs: PrefillInputs, out: Float[Tensor, "T H V"], lse: Float[Tensor, "T H"], continues: bool
) -> None:
    for first_query, num_queries, first_key, num_keys in inputs.spans.host:
        queries = slice(first_query, first_query + num_queries)
        seen = slice(first_key, first_key + num_keys)
        q_THK, k_NHK = inputs.q_nope[queries].float(), inputs.keys[seen].float()
        q_THR, k_NR = inputs.q_rope[queries].float(), inputs.rope_keys[seen].float()
        scores_THN = torch.einsum("thk,nhk->thn", q_THK, k_NHK)
        scores_THN = (scores_THN + torch.einsum("thr,nr->thn", q_THR, k_NR)) * inputs.scale
        if inputs.is_causal:
            last_seen = torch.arange(num_keys - num_queries, num_keys, device=out.device)
            is_hidden = torch.arange(num_keys, device=out.device) > last_seen[:, None]
            scores_THN = scores_THN.masked_fill(is_hidden[:, None, :], float("-inf"))
        lse_TH = torch.logsumexp(scores_THN, dim=2)
        weights_THN = torch.exp(scores_THN - _finite(lse_TH)[:, :, None])
        mean_THV = torch.einsum("thn,nhv->thv", weights_THN, inputs.values[seen].float())
        if continues:
            total_TH = torch.logaddexp(lse[queries], lse_TH)
            old, new = (torch.exp(part - _finite(total_TH)) for part in (lse[queries], lse_TH))
            mean_THV = old[:, :, None] * out[queries].float() + new[:, :, None] * mean_THV
            lse_TH = total_TH
        out[queries] = mean_THV.to(out.dtype)
        lse[queries] = lse_TH


def _finite(lse: Float[Tensor, "T H"]) -> Float[Tensor, "T H"]:
    """Where no key was seen, e^(-inf - 0) is 0 and e^(-inf + inf) would be NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _latent_prefill_cpu(
    inputs: PrefillInputs, out: Float[Tensor, "T H V"], lse: Float[Tensor, "T H"], continues: bool
) -> None:
    """The reference, whose products are the library's, on spans short enough for their scores;
    of a causal span, each with the keys up to its last query's."""
    cut = []
    for first_query, num_queries, first_key, num_keys in inputs.spans.host:
        for start in range(0, num_queries, _CPU_TILE):
            end = min(start + _CPU_TILE, num_queries)
            num_seen = num_keys - (num_queries - end if inputs.is_causal else 0)
            cut.append((first_query + start, end - start, first_key, max(num_seen, 0)))
    spans = Spans(tuple(cut), inputs.spans.device)
    latent_prefill_reference(replace(inputs, spans=spans), out, lse, continues)


def _latent_prefill_triton(
    inputs: PrefillInputs, out: Float[Tensor, "T H V"], lse: Float[Tensor, "T H"], continues: bool
) -> None:
    if inputs.spans.host:
        launch_latent_prefill(
            inputs.q_nope, inputs.q_rope, inputs.keys, inputs.rope_keys, inputs.values,
            inputs.spans.device, max(span[1] for span in inputs.spans.host), inputs.scale,
            out, lse, is_causal=inputs.is_causal, continues=continues,
        )  # fmt: skip


def _latent_prefill_meta(
    inputs: PrefillInputs, out: Float[Tensor, "T H V"], lse: Float[Tensor, "T H"], continues: bool
) -> None:
    num_heads, nope_dim = inputs.q_nope.shape[1:]
    cost = latent_prefill_cost(
        [(num_queries, num_keys) for _, num_queries, _, num_keys in inputs.spans.host],
        num_heads, nope_dim, inputs.q_rope.shape[2], inputs.values.shape[2],
        inputs.q_nope.element_size(), out.element_size(),
        is_causal=inputs.is_causal, continues=continues,
    )  # fmt: skip
    log_cost("latent_prefill", cost)


LATENT_PREFILL: Dispatch[Callable[[PrefillInputs, Tensor, Tensor, bool], None]] = Dispatch(
    "latent_prefill",
    Implementation("meta", on_meta, _latent_prefill_meta),
    Implementation("triton", runs_triton, _latent_prefill_triton),
    Implementation("cpu", on_cpu, _latent_prefill_cpu),
    Implementation("reference", anywhere, latent_prefill_reference),
)


def latent_prefill(
    inputs: PrefillInputs, out: Float[Tensor, "T H V"], lse: Float[Tensor, "T H"], continues: bool
) -> None:
    """Writes `out` and `lse` (float32, natural logarithm) of the queries in spans and of no other;
    with `continues`, merges what they hold of other keys, no matter in which order keys come."""
    assert out.shape[1:] == inputs.values.shape[1:], (out.shape, inputs.values.shape)
    assert out.stride(-1) == 1, out.stride()
    assert lse.dtype == torch.float32, lse.dtype
    run = LATENT_PREFILL.select(inputs.q_nope.device, inputs.q_nope.dtype)
    run(inputs, out, lse, continues)
