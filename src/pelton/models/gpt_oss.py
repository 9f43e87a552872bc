# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: pre-norm decoder blocks of attention with sinks and a mixture of experts.

Layers take turns between a sliding window and full attention, each kind in its own KV group. Every
head has a sink in its softmax; positions are stretched by YaRN. A token passes through 4 experts,
whose gate is a clamped SwiGLU (Agarwal et al., "gpt-oss-120b & gpt-oss-20b Model Card", 2025).
Experts are published in MXFP4 and stay so in memory, or are plain where the checkpoint has them so.
"""

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pelton.core.batch import ForwardBatch
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.layers.attention import PagedAttention
from pelton.layers.embedding import Embedding
from pelton.layers.linear import Linear
from pelton.layers.moe.experts import Experts
from pelton.layers.moe.mxfp4_experts import MXFP4Experts
from pelton.layers.moe.router import SoftmaxTopKRouter
from pelton.layers.norm import RMSNorm
from pelton.layers.rope import make_rope_table
from pelton.models.gpt_oss_config import Config
from pelton.models.language_model import LanguageModel
from pelton.models.weight_table import Weight


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        has_bias = config.attention_bias
        self.qkv = Linear(config.hidden_size, (query, kv, kv), has_bias=has_bias)
        self.output = Linear(query, (config.hidden_size,), has_bias=has_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_heads), requires_grad=False)
        group = next(i for i, g in enumerate(config.kv_groups) if layer in g.layers)
        self.attend = PagedAttention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            group=group,
            layer=config.kv_groups[group].layers.index(layer),
        )

    def forward(
        self, x: Float[Tensor, "T D"], cos_sin: Float[Tensor, "max K"], batch: ForwardBatch
    ) -> Float[Tensor, "T H*K"]:
        """In front of the output product."""
        return self.attend(self.qkv(x), cos_sin, batch, self.sinks)

    __call__ = forward


class MoE(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = SoftmaxTopKRouter(
            config.hidden_size, config.num_experts, config.top_k, has_bias=True
        )
        make_experts = MXFP4Experts if config.has_mxfp4_experts else Experts
        self.experts = make_experts(
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            Gate(alpha=config.swiglu_alpha, limit=config.swiglu_limit, offset=1.0),
            has_bias=True,
        )

    def forward(self, x: Float[Tensor, "T D"]) -> WeightedRows:
        return self.experts(x, self.router(x))

    __call__ = forward


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe = MoE(config)

    def forward(
        self,
        normed: Float[Tensor, "T D"],
        residual: Float[Tensor, "T D"],
        cos_sin: Float[Tensor, "max K"],
        batch: ForwardBatch,
        next_norm: RMSNorm,
        wanted: Int[Tensor, " N"] | None = None,
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """From what this block's `attention_norm` gives to what the norm behind the block does,
        which adds up the experts' rows: four a token, which would otherwise be kept through the
        next attention. `wanted`: the tokens to go on with behind attention, all if not given."""
        attended = self.attention(normed, cos_sin, batch)
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        if not attended.shape[0]:
            return residual.to(normed.dtype), residual
        normed, residual = self.moe_norm.add(self.attention.output(attended), residual)
        return next_norm.add(self.moe(normed), residual)

    __call__ = forward


class Model(LanguageModel):
    has_experts = True
    cos_sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, (config.vocab_size,))
        table = make_rope_table(
            config.max_context,
            config.head_dim,
            config.rope_theta,
            config.rope_factors,
            self.embedding.weight.device,
            config.rope_magnitude,
        )
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "N D"]:
        x = self.embedding(batch.token_ids)
        residual = torch.zeros_like(x, dtype=torch.float32)
        blocks = cast(list[Block], list(self.blocks))
        norms = [*(block.attention_norm for block in blocks), self.norm]
        normed, residual = norms[0].add(x, residual)
        for block, next_norm in zip(blocks, norms[1:], strict=True):
            wanted = batch.hidden_rows if next_norm is self.norm else None
            normed, residual = block(normed, residual, self.cos_sin, batch, next_norm, wanted)
        return normed

    __call__ = forward

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.head(hidden_states)


_LAYER, _BLOCK = "model.layers.{layer}.", "blocks.{layer}."
_SOURCE, _EXPERTS = _LAYER + "mlp.experts.", _BLOCK + "moe.experts."

WEIGHTS = (
    Weight("model.embed_tokens.weight", "embedding.weight"),
    Weight(_LAYER + "input_layernorm.weight", _BLOCK + "attention_norm.weight"),
    Weight(_LAYER + "self_attn.q_proj.weight", _BLOCK + "attention.qkv.weight", 0),
    Weight(_LAYER + "self_attn.k_proj.weight", _BLOCK + "attention.qkv.weight", 1),
    Weight(_LAYER + "self_attn.v_proj.weight", _BLOCK + "attention.qkv.weight", 2),
    Weight(_LAYER + "self_attn.o_proj.weight", _BLOCK + "attention.output.weight"),
    Weight(_LAYER + "self_attn.sinks", _BLOCK + "attention.sinks"),
    Weight(_LAYER + "post_attention_layernorm.weight", _BLOCK + "moe_norm.weight"),
    Weight(_LAYER + "mlp.router.weight", _BLOCK + "moe.router.logits.weight"),
    Weight(_LAYER + "mlp.router.bias", _BLOCK + "moe.router.logits.bias"),
    Weight(_SOURCE + "gate_up_proj_bias", _EXPERTS + "gate_up_bias"),
    Weight(_SOURCE + "down_proj_bias", _EXPERTS + "down_bias"),
    Weight("model.norm.weight", "norm.weight"),
    Weight("lm_head.weight", "head.weight"),
)
ATTENTION_BIAS = (
    Weight(_LAYER + "self_attn.q_proj.bias", _BLOCK + "attention.qkv.bias", 0),
    Weight(_LAYER + "self_attn.k_proj.bias", _BLOCK + "attention.qkv.bias", 1),
    Weight(_LAYER + "self_attn.v_proj.bias", _BLOCK + "attention.qkv.bias", 2),
    Weight(_LAYER + "self_attn.o_proj.bias", _BLOCK + "attention.output.bias"),
)
PLAIN_EXPERTS = (
    Weight(_SOURCE + "gate_up_proj", _EXPERTS + "gate_up", is_transposed=True),
    Weight(_SOURCE + "down_proj", _EXPERTS + "down", is_transposed=True),
)
MXFP4_EXPERTS = (
    Weight(_SOURCE + "gate_up_proj_blocks", _EXPERTS + "gate_up_blocks"),
    Weight(_SOURCE + "gate_up_proj_scales", _EXPERTS + "gate_up_scales"),
    Weight(_SOURCE + "down_proj_blocks", _EXPERTS + "down_blocks"),
    Weight(_SOURCE + "down_proj_scales", _EXPERTS + "down_scales"),
)


def weights(config: Config) -> tuple[Weight, ...]:
    """Which checkpoint tensor fills which parameter of `Model(config)`."""
    table = WEIGHTS + (MXFP4_EXPERTS if config.has_mxfp4_experts else PLAIN_EXPERTS)
    return table + ATTENTION_BIAS if config.attention_bias else table
