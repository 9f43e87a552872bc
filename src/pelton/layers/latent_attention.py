# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention over the paged cache of latents, in its two forms.

Absorbed, a step reads one latent a token instead of a key and a value for each head (DeepSeek-V2,
2024, section 2.1.2):

    q_latent <- q_nope W_k        a head's key projection taken into the query
    o_latent <- attention(q_latent, q_rope, cached latents)
    o        <- o_latent W_v      a head's value projection of the weighted sum

Un-absorbed, scores and sums are over a head's 192 and 128 numbers instead of 576 and 512, once its
keys and values are made from the latents, part by part of the context:

    k, v     <- W_k c, W_v c
    o, lse   <- merge((o, lse), attention(q, (k, r), v))

`latent_rows` says which row takes which.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pelton.kernels.head_product import head_product
from pelton.kernels.linear import linear
from pelton.kernels.mla.op import latent_attention
from pelton.kernels.mla.prefill import PrefillInputs, latent_prefill
from pelton.kernels.mla.write_latent import write_latent
from pelton.layers.fp8_linear import FP8Linear, make_linear
from pelton.layers.latent_rows import AbsorbedRows, KeyPart, LatentRows
from pelton.layers.linear import Linear
from pelton.quantization.fp8_scheme import FP8Scheme


class UpProjection(nn.Module):
    """The projection from latents to each head's key and value, split in its two halves.

    It is loaded as one product and, since it is taken into queries and outputs as well as applied
    to latents, kept in the activations' number format whatever the checkpoint's is.
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
        self.weight: Float[Tensor, "H*(K+V) L"] | None = None
        self.keys: Float[Tensor, "H K L"] | None = None
        self.values: Float[Tensor, "H L V"] | None = None

    def absorb(self) -> None:
        """Call once, after loading."""
        loaded = self.loaded
        assert loaded is not None, "absorbed already"
        weight = loaded.weight.detach()
        if isinstance(loaded, FP8Linear):
            weight = loaded.dequantize().to(self._dtype)
        self.weight = weight
        weight = weight.view(self._shape)
        self.keys = weight[:, : self._key_dim]
        self.values = weight[:, self._key_dim :].transpose(1, 2)
        self.loaded = None


class LatentAttention(nn.Module):
    """Rotates, stores the latent, attends. `layer` is the layer's index within its KV group."""

    def __init__(self, up: UpProjection, scale: float, *, layer: int) -> None:
        super().__init__()
        self.up = up
        self._scale = scale
        self._layer = layer

    def forward(
        self,
        q: Float[Tensor, "T H K+R"],
        latent: Float[Tensor, "T L"],
        k_rope: Float[Tensor, "T R"],
        cos_sin: Float[Tensor, "max R"],
        rows: LatentRows,
    ) -> Float[Tensor, "T H*V"]:
        keys, values = self.up.keys, self.up.values
        assert keys is not None, "the model must be packed before it runs"
        assert values is not None, "the model must be packed before it runs"
        cache = rows.group.cache[:, self._layer, 0, :, 0]
        q_nope, q_rope = torch.split(q, [keys.shape[1], k_rope.shape[1]], dim=2)
        q_rope = write_latent(
            q_rope, latent, k_rope, rows.batch.positions, cos_sin, cache, rows.group.slot_mapping
        )
        if not rows.parts:
            assert rows.absorbed is not None, "no rows"
            attended = self._attend_absorbed(q_nope, q_rope, cache, rows.absorbed, keys, values)
            return attended.reshape(q.shape[0], -1)
        # Padding tokens are in no row and get zeros. A mean that is merged stays in float32.
        out = q.new_zeros(
            (*q.shape[:2], values.shape[2]),
            dtype=torch.float32 if len(rows.parts) > 1 else q.dtype,
        )
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for index, part in enumerate(rows.parts):
            self._attend_part(q_nope, q_rope, cache, part, out, lse, is_own=index == 0)
        if rows.absorbed is not None:
            tokens = rows.absorbed.tokens
            assert tokens is not None, "absorbed rows are all and not all"
            attended = self._attend_absorbed(
                q_nope.index_select(0, tokens),
                q_rope.index_select(0, tokens),
                cache,
                rows.absorbed,
                keys,
                values,
            )
            out.index_copy_(0, tokens, attended.to(out.dtype))
        return out.to(q.dtype).reshape(q.shape[0], -1)

    __call__ = forward

    def _attend_absorbed(
        self,
        q_nope: Float[Tensor, "t H K"],
        q_rope: Float[Tensor, "t H R"],
        cache: Float[Tensor, "P S L+R"],
        rows: AbsorbedRows,
        keys: Float[Tensor, "H K L"],
        values: Float[Tensor, "H L V"],
    ) -> Float[Tensor, "t H V"]:
        attended = latent_attention(
            head_product(q_nope, keys),
            q_rope,
            cache,
            rows.rows,
            self._scale,
        )
        return head_product(attended, values)

    def _attend_part(
        self,
        q_nope: Float[Tensor, "T H K"],
        q_rope: Float[Tensor, "T H R"],
        cache: Float[Tensor, "P S L+R"],
        part: KeyPart,
        out: Float[Tensor, "T H V"],
        lse: Float[Tensor, "T H"],
        *,
        is_own: bool,
    ) -> None:
        """Merges what the rows see of `part` into `out` and `lse`; the first part, which is the
        rows' own tokens, starts them. Keys and values are gone when this returns."""
        weight = self.up.weight
        assert weight is not None, "the model must be packed before it runs"
        num_heads, key_dim = q_nope.shape[1:]
        latent_rank = weight.shape[1]
        entries = cache[part.blocks, part.offsets]
        made = linear(entries[:, :latent_rank], weight).view(entries.shape[0], num_heads, -1)
        inputs = PrefillInputs(
            q_nope,
            q_rope,
            made[:, :, :key_dim],
            entries[:, latent_rank:],
            made[:, :, key_dim:],
            part.spans,
            self._scale,
            is_causal=is_own,
        )
        latent_prefill(inputs, out, lse, continues=not is_own)
