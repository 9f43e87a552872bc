# SPDX-License-Identifier: Apache-2.0
"""The Llama family: pre-norm decoder blocks of grouped-query attention and a gated MLP.

Llama, Mistral (every layer sees a sliding window) and Qwen2 (biased query, key and value) differ
only in `Config`. Query, key and value are one product, so are gate and up. The residual sum is
fused with the norm that follows it, so a block takes and returns (x, residual) with the hidden
states being x + residual. Keys and values live in the batch's cache, in one KV group.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pelton.core.batch import ForwardBatch
from pelton.layers.attention import PagedAttention
from pelton.layers.embedding import Embedding
from pelton.layers.fp8_linear import make_linear
from pelton.layers.linear import Linear
from pelton.layers.norm import InputNorm, RMSNorm
from pelton.layers.rope import make_rope_table
from pelton.models.fp8_table import scale_rows
from pelton.models.language_model import LanguageModel
from pelton.models.llama_config import Config
from pelton.models.weight_table import Weight
from pelton.quantization.fp8 import Rows


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        fp8 = config.fp8_of(layer, *names)
        self.qkv = make_linear(
            config.hidden_size,
            (query, kv, kv),
            fp8,
            has_bias=config.qkv_bias,
            gives_float32=config.fp8 is None,
        )
        fp8 = config.fp8_of(layer, "self_attn.o_proj")
        self.output = make_linear(
            query,
            (config.hidden_size,),
            fp8,
            has_bias=config.output_bias,
            gives_float32=config.fp8 is None,
        )
        self.attend = PagedAttention(
            config.num_heads, config.num_kv_heads, config.head_dim, group=0, layer=layer
        )

    def forward(
        self, x: Rows, cos_sin: Float[Tensor, "max K"], batch: ForwardBatch
    ) -> Float[Tensor, "T H*K"]:
        """In front of the output product."""
        return self.attend(self.qkv(x), cos_sin, batch)

    __call__ = forward


class MLP(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        size = config.intermediate_size
        fp8 = config.fp8_of(layer, "mlp.gate_proj", "mlp.up_proj")
        gives_float32 = config.fp8 is None
        self.gate_up = make_linear(
            config.hidden_size, (size, size), fp8, gives_float32=gives_float32
        )
        fp8 = config.fp8_of(layer, "mlp.down_proj")
        self.down = make_linear(size, (config.hidden_size,), fp8, gives_float32=gives_float32)

    def forward(self, x: Rows) -> Float[Tensor, "T D"]:
        return self.down.gated(self.gate_up(x))

    __call__ = forward


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(config, layer)
        self.attention_norm = InputNorm(hidden, eps, self.attention.qkv.fp8)
        self.mlp = MLP(config, layer)
        self.mlp_norm = InputNorm(hidden, eps, self.mlp.gate_up.fp8)

    def forward(
        self,
        x: Float[Tensor, "T D"],
        residual: Float[Tensor, "T D"],
        cos_sin: Float[Tensor, "max K"],
        batch: ForwardBatch,
        wanted: Int[Tensor, " N"] | None = None,
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """`wanted`: the tokens to go on with behind attention, all if not given."""
        normed, residual = self.attention_norm.add(x, residual)
        attended = self.attention(normed, cos_sin, batch)
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        if not attended.shape[0]:
            return residual.to(x.dtype), residual
        normed, residual = self.mlp_norm.add(self.attention.output(attended), residual)
        return self.mlp(normed), residual

    __call__ = forward


class Model(LanguageModel):
    cos_sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, (config.vocab_size,))
        if config.tie_word_embeddings:
            self.head.weight = self.embedding.weight
        table = make_rope_table(
            config.max_context,
            config.head_dim,
            config.rope_theta,
            config.rope_factors,
            self.embedding.weight.device,
        )
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "N D"]:
        x = self.embedding(batch.token_ids)
        residual = torch.zeros_like(x, dtype=torch.float32)
        *blocks, last = self.blocks
        for block in blocks:
            x, residual = block(x, residual, self.cos_sin, batch)
        x, residual = last(x, residual, self.cos_sin, batch, batch.hidden_rows)
        normed, _ = self.norm.add(x, residual)
        return normed

    __call__ = forward

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.head(hidden_states)


_LAYER = "model.layers.{layer}."
_BLOCK = "blocks.{layer}."

WEIGHTS = (
    Weight("model.embed_tokens.weight", "embedding.weight"),
    Weight(_LAYER + "input_layernorm.weight", _BLOCK + "attention_norm.weight"),
    Weight(_LAYER + "self_attn.q_proj.weight", _BLOCK + "attention.qkv.weight", 0),
    Weight(_LAYER + "self_attn.k_proj.weight", _BLOCK + "attention.qkv.weight", 1),
    Weight(_LAYER + "self_attn.v_proj.weight", _BLOCK + "attention.qkv.weight", 2),
    Weight(_LAYER + "self_attn.o_proj.weight", _BLOCK + "attention.output.weight"),
    Weight(_LAYER + "post_attention_layernorm.weight", _BLOCK + "mlp_norm.weight"),
    Weight(_LAYER + "mlp.gate_proj.weight", _BLOCK + "mlp.gate_up.weight", 0),
    Weight(_LAYER + "mlp.up_proj.weight", _BLOCK + "mlp.gate_up.weight", 1),
    Weight(_LAYER + "mlp.down_proj.weight", _BLOCK + "mlp.down.weight"),
    Weight("model.norm.weight", "norm.weight"),
)
QKV_BIAS = (
    Weight(_LAYER + "self_attn.q_proj.bias", _BLOCK + "attention.qkv.bias", 0),
    Weight(_LAYER + "self_attn.k_proj.bias", _BLOCK + "attention.qkv.bias", 1),
    Weight(_LAYER + "self_attn.v_proj.bias", _BLOCK + "attention.qkv.bias", 2),
)
OUTPUT_BIAS = (Weight(_LAYER + "self_attn.o_proj.bias", _BLOCK + "attention.output.bias"),)
HEAD = (Weight("lm_head.weight", "head.weight"),)


def weights(config: Config) -> tuple[Weight, ...]:
    """Which checkpoint tensor fills which parameter of `Model(config)`."""
    table: tuple[Weight, ...] = WEIGHTS
    if config.qkv_bias:
        table += QKV_BIAS
    if config.output_bias:
        table += OUTPUT_BIAS
    if not config.tie_word_embeddings:
        table += HEAD
    products = [row for row in WEIGHTS if "_proj." in row.source]
    return (*table, *scale_rows(products, config.fp8, config.num_layers))
