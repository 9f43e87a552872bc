# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention of a step's tokens over the paged KV cache."""

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.core.batch import ForwardBatch
from pelton.kernels.paged_attention.op import paged_attention
from pelton.kernels.rope_write_kv import rope_write_kv


class PagedAttention:
    """Rotates queries and keys, stores keys and values, attends. Holds no tensors.

    `group` is the index of the layer's KV group, `layer` its index within the group. `k_scale` and
    `v_scale` are what the checkpoint brings for keys and values in FP8; 1 without it.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, *, group: int, layer: int
    ) -> None:
        self._split = [num_heads, num_kv_heads, num_kv_heads]
        self._head_dim = head_dim
        self._group = group
        self._layer = layer
        self._scale = head_dim**-0.5
        self.k_scale = self.v_scale = 1.0
        self._dtype = torch.get_default_dtype()

    def __call__(
        self,
        qkv: Float[Tensor, "T (H+2G)*K"],
        cos_sin: Float[Tensor, "max K"],
        batch: ForwardBatch,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "T H*K"]:
        group = batch.groups[self._group]
        cache = group.cache.select(1, self._layer)
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        q, k, v = heads.split_with_sizes(self._split, 1)
        q = rope_write_kv(
            q,
            k,
            v,
            batch.positions,
            cos_sin,
            cache,
            group.slot_mapping,
            self.k_scale,
            self.v_scale,
            self._dtype,
        )
        attended = paged_attention(
            q,
            cache,
            batch.rows(group),
            self._scale,
            group.window,
            sinks,
            self.k_scale,
            self.v_scale,
        )
        return attended.view(qkv.shape[0], -1)
