# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 and R1: pre-norm decoder blocks of latent attention and a mixture of experts.

Queries and the cached latent are projected down together, queries up again; keys and values are
made for long rows alone and never kept (see `layers.latent_attention`). The first layers have a
dense feed-forward; the others add a shared expert to those that a sigmoid router picks within the
best groups (DeepSeek-V3 technical report, 2024). Weights are published in FP8 blocks of 128 x 128.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pelton.core.batch import ForwardBatch
from pelton.kernels.moe.gate import SWIGLU
from pelton.kernels.moe.grouped_routing import GroupedRouting
from pelton.layers.embedding import Embedding
from pelton.layers.fp8_linear import make_linear
from pelton.layers.latent_attention import LatentAttention, UpProjection
from pelton.layers.latent_rows import LatentRows, split_rows
from pelton.layers.linear import Linear
from pelton.layers.moe.experts import Experts
from pelton.layers.moe.fp8_experts import FP8Experts
from pelton.layers.moe.grouped_router import GroupedRouter
from pelton.layers.norm import InputNorm, RMSNorm
from pelton.layers.rope import make_rope_table
from pelton.models.deepseek_v3_config import Config
from pelton.models.fp8_table import scale_rows
from pelton.models.language_model import LanguageModel
from pelton.models.weight_table import Weight
from pelton.quantization.fp8 import Rows, plain_rows

RANK_NORM_EPS = 1e-6
"""Of the norms inside attention, whatever `rms_norm_eps` says."""


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads
        self._latent_sizes = [config.query_rank, config.latent_rank, config.rope_dim]
        self._num_heads = heads
        self.down = make_linear(
            hidden,
            (config.query_rank, config.latent_rank + config.rope_dim),
            config.fp8_of(layer, "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            has_bias=config.attention_bias,
        )
        self.latent_norm = RMSNorm(config.latent_rank, RANK_NORM_EPS)
        self.query_up = make_linear(
            config.query_rank,
            (heads * (config.nope_dim + config.rope_dim),),
            config.fp8_of(layer, "self_attn.q_b_proj"),
        )
        self.query_norm = InputNorm(config.query_rank, RANK_NORM_EPS, self.query_up.fp8)
        up = UpProjection(
            config.latent_rank,
            heads,
            config.nope_dim,
            config.value_dim,
            config.fp8_of(layer, "self_attn.kv_b_proj"),
        )
        self.attend = LatentAttention(up, config.softmax_scale, layer=layer)
        self.output = make_linear(
            heads * config.value_dim,
            (hidden,),
            config.fp8_of(layer, "self_attn.o_proj"),
            has_bias=config.attention_bias,
        )

    def forward(
        self, x: Rows, cos_sin: Float[Tensor, "max R"], rows: LatentRows
    ) -> Float[Tensor, "T H*V"]:
        """In front of the output product."""
        query, latent, k_rope = torch.split(self.down(x), self._latent_sizes, dim=1)
        q = self.query_up(self.query_norm(query)).view(query.shape[0], self._num_heads, -1)
        return self.attend(q, self.latent_norm(latent), k_rope, cos_sin, rows)

    __call__ = forward


class MLP(nn.Module):
    def __init__(self, config: Config, layer: int, size: int, name: str) -> None:
        super().__init__()
        hidden = config.hidden_size
        fp8 = config.fp8_of(layer, f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = make_linear(hidden, (size, size), fp8)
        self.down = make_linear(size, (hidden,), config.fp8_of(layer, f"{name}.down_proj"))

    def forward(self, x: Rows) -> Float[Tensor, "T D"]:
        return self.down.gated(self.gate_up(x))

    __call__ = forward


class MoE(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        rule = GroupedRouting(
            top_k=config.top_k,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            is_normalized=config.is_normalized,
            scale=config.routing_scale,
        )
        self.router = GroupedRouter(config.hidden_size, config.num_experts, rule)
        make_experts = Experts if config.expert_fp8(layer) is None else FP8Experts
        self.experts = make_experts(
            config.num_experts, config.hidden_size, config.expert_size, SWIGLU
        )
        size = config.num_shared_experts * config.expert_size
        self.shared = MLP(config, layer, size, "mlp.shared_experts")

    def forward(self, x: Rows) -> Float[Tensor, "T D"]:
        return self.experts(x, self.router(plain_rows(x))).sum() + self.shared(x)

    __call__ = forward


class Block(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Attention(config, layer)
        self.attention_norm = InputNorm(hidden, eps, self.attention.down.fp8)
        self.mlp: MLP | MoE
        if layer < config.num_dense_layers:
            self.mlp = MLP(config, layer, config.intermediate_size, "mlp")
            self.mlp_norm = InputNorm(hidden, eps, self.mlp.gate_up.fp8)
        else:
            self.mlp = MoE(config, layer)
            fp8 = config.expert_fp8(layer) or self.mlp.shared.gate_up.fp8
            self.mlp_norm = InputNorm(hidden, eps, fp8, keeps_plain=True)

    def forward(
        self,
        x: Float[Tensor, "T D"],
        residual: Float[Tensor, "T D"],
        cos_sin: Float[Tensor, "max R"],
        rows: LatentRows,
        wanted: Int[Tensor, " N"] | None = None,
    ) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """`wanted`: the tokens to go on with behind attention, all if not given."""
        normed, residual = self.attention_norm.add(x, residual)
        attended = self.attention(normed, cos_sin, rows)
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), residual.index_select(0, wanted)
        if not attended.shape[0]:
            return residual.to(x.dtype), residual
        normed, residual = self.mlp_norm.add(self.attention.output(attended), residual)
        return self.mlp(normed), residual

    __call__ = forward


class MTP(nn.Module):
    """The multi-token prediction layer: from the hidden state of a token and the token that
    follows, the hidden state that predicts the one after (technical report, section 2.2). Embedding
    and head are the model's; its latents are the layer behind the model's last in the cache."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.projection = Linear(2 * hidden, (hidden,))
        self.block = Block(config, config.num_layers)
        self.norm = RMSNorm(hidden, eps)

    def forward(
        self,
        hidden_states: Float[Tensor, "T D"],
        embedded: Float[Tensor, "T D"],
        cos_sin: Float[Tensor, "max R"],
        rows: LatentRows,
    ) -> Float[Tensor, "T D"]:
        """Normed, as the model's own hidden states are."""
        parts = (self.embedding_norm(embedded), self.hidden_norm(hidden_states))
        x = self.projection(torch.cat(parts, dim=1))
        x, residual = self.block(x, torch.zeros_like(x, dtype=torch.float32), cos_sin, rows)
        normed, _ = self.norm.add(x, residual)
        return normed

    __call__ = forward


class Model(LanguageModel):
    has_experts = True
    cos_sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.unused_tensors = tuple(_unused_tensors(config))
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, (config.vocab_size,))
        self.mtp = MTP(config) if config.has_mtp else None
        table = make_rope_table(
            config.max_context,
            config.rope_dim,
            config.rope_theta,
            config.rope_factors,
            self.embedding.weight.device,
            config.rope_magnitude,
        )
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, batch: ForwardBatch) -> Float[Tensor, "N D"]:
        x = self.embedding(batch.token_ids)
        residual = torch.zeros_like(x, dtype=torch.float32)
        rows = split(self.config, batch)
        *blocks, last = self.blocks
        for block in blocks:
            x, residual = block(x, residual, self.cos_sin, rows)
        x, residual = last(x, residual, self.cos_sin, rows, batch.hidden_rows)
        normed, _ = self.norm.add(x, residual)
        return normed

    __call__ = forward

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        return self.head(hidden_states)

    def mtp_layer(self) -> "Drafting | None":
        return None if self.mtp is None else Drafting(self, self.mtp)


class Drafting:
    """The MTP layer with what it shares with its model. It may be run as a chain: its hidden states
    take the place of the model's for the token one further."""

    def __init__(self, model: Model, layer: MTP) -> None:
        self._model = model
        self._layer = layer

    def __call__(
        self,
        hidden_states: Float[Tensor, "T D"],
        next_token_ids: Int[Tensor, " T"],
        batch: ForwardBatch,
    ) -> Float[Tensor, "T D"]:
        """From what the model (or this layer) returned for each token of `batch` and the token
        that follows it. `batch.token_ids` is not read."""
        embedded = self._model.embedding(next_token_ids)
        rows = split(self._model.config, batch)
        return self._layer(hidden_states, embedded, self._model.cos_sin, rows)

    def logits(self, hidden_states: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Of the token two after each, from what a call returned."""
        return self._model.logits(hidden_states)


def split(config: Config, batch: ForwardBatch) -> LatentRows:
    """By the form of attention that each row takes: the same for all layers, in one KV group."""
    sizes = config.nope_dim, config.value_dim, config.latent_rank
    return split_rows(batch, batch.groups[0], *sizes)


def _unused_tensors(config: Config) -> Iterator[str]:
    """MTP layers that are not built, and a built one's copies of the embedding and the head."""
    for index in range(config.num_mtp_layers):
        layer = f"model.layers.{config.num_layers + index}."
        if config.has_mtp and index == 0:
            yield from (layer + "embed_tokens.", layer + "shared_head.head.")
        else:
            yield layer


WEIGHTS = (
    Weight("model.embed_tokens.weight", "embedding.weight"),
    Weight("model.norm.weight", "norm.weight"),
    Weight("lm_head.weight", "head.weight"),
)
NORMS = (
    ("input_layernorm.weight", "attention_norm.weight"),
    ("post_attention_layernorm.weight", "mlp_norm.weight"),
    ("self_attn.q_a_layernorm.weight", "attention.query_norm.weight"),
    ("self_attn.kv_a_layernorm.weight", "attention.latent_norm.weight"),
)
MTP_WEIGHTS = (
    ("enorm.weight", "embedding_norm.weight"),
    ("hnorm.weight", "hidden_norm.weight"),
    ("eh_proj.weight", "projection.weight"),
    ("shared_head.norm.weight", "norm.weight"),
)
PRODUCTS = (
    ("self_attn.q_a_proj", "attention.down", 0),
    ("self_attn.kv_a_proj_with_mqa", "attention.down", 1),
    ("self_attn.q_b_proj", "attention.query_up", None),
    ("self_attn.kv_b_proj", "attention.attend.up.loaded", None),
    ("self_attn.o_proj", "attention.output", None),
)
BIASED = PRODUCTS[0], PRODUCTS[1], PRODUCTS[4]
GATED = (("gate_proj", "gate_up", 0), ("up_proj", "gate_up", 1), ("down_proj", "down", None))


def layer_weights(config: Config, layer: int, target: str) -> Iterator[Weight]:
    """Rows of one layer, whose block is the module `target` of the model."""
    source = f"model.layers.{layer}."
    is_dense = layer < config.num_dense_layers
    yield from (Weight(source + name, f"{target}.{own}") for name, own in NORMS)
    products = list(PRODUCTS)
    mlp = "" if is_dense else "shared_experts."
    own_mlp = "mlp." if is_dense else "mlp.shared."
    products += [(f"mlp.{mlp}{name}", own_mlp + own, part) for name, own, part in GATED]
    rows = [
        Weight(f"{source}{name}.weight", f"{target}.{own}.weight", part)
        for name, own, part in products
    ]
    yield from rows
    yield from scale_rows(rows, config.fp8, 1)
    if config.attention_bias:
        for name, own, part in BIASED:
            yield Weight(f"{source}{name}.bias", f"{target}.{own}.bias", part)
    if is_dense:
        return
    yield Weight(source + "mlp.gate.weight", f"{target}.mlp.router.weight")
    bias = "mlp.gate.e_score_correction_bias"
    yield Weight(source + bias, f"{target}.mlp.router.correction_bias")
    scheme = config.expert_fp8(layer)
    for name, own, part in GATED:
        expert = f"{source}mlp.experts.{{expert}}.{name}."
        yield Weight(expert + "weight", f"{target}.mlp.experts.{own}", part)
        if scheme is not None:
            yield Weight(expert + scheme.scale_name, f"{target}.mlp.experts.{own}_scale", part)


def weights(config: Config) -> tuple[Weight, ...]:
    """Which checkpoint tensor fills which parameter of `Model(config)`."""
    rows = [*WEIGHTS]
    for layer in range(config.num_layers):
        rows += layer_weights(config, layer, f"blocks.{layer}")
    if config.has_mtp:
        rows += layer_weights(config, config.num_layers, "mtp.block")
        source = f"model.layers.{config.num_layers}."
        rows += [Weight(source + name, f"mtp.{own}") for name, own in MTP_WEIGHTS]
    return tuple(rows)
