# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over the paged cache of latents, in its absorbed form.

    q_latent <- q_nope W_k        a head's key projection taken into the query
    o_latent <- attention(q_latent, q_rope, cached latents)
    o        <- o_latent W_v      a head's value projection of the weighted sum

so that a step reads one latent a token instead of a key and a value for each head (DeepSeek-V2,
2024, section 2.1.2).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.core.batch import ForwardBatch
from pelton.kernels.head_product import head_product
from pelton.kernels.mla.op import latent_attention
from pelton.kernels.mla.write_latent import write_latent
from pelton.layers.fp8_linear import FP8Linear, make_linear
from pelton.layers.linear import Linear
from pelton.quantization.fp8_scheme import FP8Scheme


class UpProjection(nn.Module):
    """The projection from latents to each head's key and value, split in its two halves.

    It is loaded as one product and, since it is taken into queries and outputs instead of being
    applied to latents, kept in the activations' number format whatever the checkpoint's is.
    """

    def __init__(
        self,
        latent_rank: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        fp8: FP8Scheme | None,
    ) -> None:
        super().__init__()
        self._shape = (num_heads, key_dim + value_dim, latent_rank)
        self._key_dim = key_dim
        self._dtype = torch.get_default_dtype()
        rows = num_heads * (key_dim + value_dim)
        self.loaded: Linear | None = make_linear(latent_rank, (rows,), fp8)
        self.keys: Float[Tensor, "H K L"] | None = None
        self.values: Float[Tensor, "H L V"] | None = None

    def absorb(self) -> None:
        """Call once, after loading."""
        loaded = self.loaded
        assert loaded is not None, "absorbed already"
        weight = loaded.weight.detach()
        if isinstance(loaded, FP8Linear):
            weight = loaded.dequantize().to(self._dtype)
        weight = weight.view(self._shape)
        self.keys = weight[:, : self._key_dim]
        self.values = weight[:, self._key_dim :].transpose(1, 2)
        self.loaded = None


class LatentAttention(nn.Module):
    """Rotates, stores the latent, attends. `group` is the index of the layer's KV group, `layer`
    its index within the group."""

    def __init__(self, up: UpProjection, scale: float, *, group: int, layer: int) -> None:
        super().__init__()
        self.up = up
        self._scale = scale
        self._group = group
        self._layer = layer

    def forward(
        self,
        q: Float[Tensor, "T H K+R"],
        latent: Float[Tensor, "T L"],
        k_rope: Float[Tensor, "T R"],
        cos_sin: Float[Tensor, "max R"],
        batch: ForwardBatch,
    ) -> Float[Tensor, "T H*V"]:
        keys, values = self.up.keys, self.up.values
        assert keys is not None, "the model must be packed before it runs"
        assert values is not None, "the model must be packed before it runs"
        group = batch.groups[self._group]
        cache = group.cache[:, self._layer, 0, :, 0]
        q_nope, q_rope = torch.split(q, [keys.shape[1], k_rope.shape[1]], dim=2)
        q_rope = write_latent(
            q_rope, latent, k_rope, batch.positions, cos_sin, cache, group.slot_mapping
        )
        attended = latent_attention(
            head_product(q_nope, keys),
            q_rope,
            cache,
            group.block_tables,
            batch.query_starts,
            batch.context_lens,
            batch.num_decodes,
            batch.max_query_len,
            batch.max_context_len,
            self._scale,
        )
        return head_product(attended, values).reshape(q.shape[0], -1)

    __call__ = forward
