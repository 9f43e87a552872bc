# SPDX-License-Identifier: Apache-2.0
"""The sizes and constants of a DeepSeek-V3 or R1 model, read from Hugging Face's config.json keys.

Needs no torch. A setting that would change the numbers and is not implemented is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pelton.core.errors import CheckpointError
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.models.config_keys import ConfigKeys, wrong, yarn_mscale
from pelton.quantization.fp8_scheme import (
    BLOCKS,
    FP8Scheme,
    Granularity,
    read_fp8_scheme,
    scheme_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers."""
    num_dense_layers: int
    """The first layers, whose feed-forward is not a mixture of experts."""
    expert_size: int
    num_experts: int
    num_shared_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    is_normalized: bool
    routing_scale: float
    num_heads: int
    query_rank: int
    latent_rank: int
    nope_dim: int
    """Of a head's query and key, the part without a position."""
    rope_dim: int
    value_dim: int
    vocab_size: int
    max_context: int
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    rope_magnitude: float = 1.0
    softmax_mscale: float = 1.0
    """YaRN's correction of the softmax scale; its square multiplies the scale."""
    num_mtp_layers: int = 0
    """Multi-token prediction layers behind the last layer in the checkpoint."""
    has_mtp: bool = False
    """Whether the model is built with the first of them, which drafts."""
    fp8: FP8Scheme | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Raises `CheckpointError` for a missing, ill-typed or unsupported setting."""
        keys = ConfigKeys(config)
        keys.refuse_unless("hidden_act", ("silu",), "silu")
        keys.refuse_unless("tie_word_embeddings", (False,), False)
        keys.refuse_unless("rope_interleave", (True, None), True)
        keys.refuse_unless("scoring_func", ("sigmoid",), "sigmoid")
        keys.refuse_unless("topk_method", ("noaux_tc",), "noaux_tc")
        keys.refuse_unless("moe_layer_freq", (1,), 1)
        num_experts, num_groups = keys.positive("n_routed_experts"), keys.positive("n_group", 1)
        top_k, top_groups = keys.positive("num_experts_per_tok"), keys.positive("topk_group", 1)
        _check_groups(num_experts, num_groups, top_groups, top_k)
        rope_dim = keys.positive("qk_rope_head_dim")
        if rope_dim % 2:
            raise wrong("qk_rope_head_dim", "even", rope_dim)
        has_yarn = keys.rope_kind() == "yarn"
        num_layers = keys.positive("num_hidden_layers")
        return cls(
            num_layers=num_layers,
            hidden_size=keys.positive("hidden_size"),
            intermediate_size=keys.positive("intermediate_size"),
            num_dense_layers=min(_count(keys, "first_k_dense_replace", 0), num_layers),
            expert_size=keys.positive("moe_intermediate_size"),
            num_experts=num_experts,
            num_shared_experts=keys.positive("n_shared_experts", 1),
            top_k=top_k,
            num_groups=num_groups,
            top_groups=top_groups,
            is_normalized=keys.flag("norm_topk_prob", True),
            routing_scale=keys.number("routed_scaling_factor", 1.0),
            num_heads=keys.positive("num_attention_heads"),
            query_rank=keys.positive("q_lora_rank"),
            latent_rank=keys.positive("kv_lora_rank"),
            nope_dim=keys.positive("qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=keys.positive("v_head_dim"),
            vocab_size=keys.positive("vocab_size"),
            max_context=keys.positive("max_position_embeddings"),
            attention_bias=keys.flag("attention_bias", False),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope_theta=keys.rope_theta(),
            rope_factors=keys.yarn_factors(rope_dim) if has_yarn else keys.rope_factors(rope_dim),
            rope_magnitude=keys.yarn_magnitude() if has_yarn else 1.0,
            softmax_mscale=_softmax_mscale(keys, config) if has_yarn else 1.0,
            num_mtp_layers=_count(keys, "num_nextn_predict_layers", 0),
            fp8=read_fp8_scheme(config, nearest=BLOCKS),
            dtype=keys.text("dtype", keys.text("torch_dtype", "bfloat16")),
            bos_token_id=keys.token_id("bos_token_id"),
            eos_token_ids=keys.token_ids("eos_token_id"),
        )

    def with_mtp(self) -> "Config":
        """The same model built with its MTP layer, whose latents are a layer more in the cache.
        Raises `CheckpointError` where the checkpoint has none."""
        if not self.num_mtp_layers:
            raise CheckpointError(
                "The checkpoint has no multi-token prediction layer (num_nextn_predict_layers is"
                " 0); use --speculative ngram:3 or off."
            )
        return replace(self, has_mtp=True)

    def fp8_of(self, layer: int, *products: str) -> FP8Scheme | None:
        """How the fused weights of `products` ("mlp.up_proj") are stored in a layer."""
        return scheme_of(self.fp8, [f"model.layers.{layer}.{name}" for name in products])

    def expert_fp8(self, layer: int) -> FP8Scheme | None:
        """How the experts of a layer are stored; refuses what their products do not take."""
        names = [f"mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")]
        scheme = self.fp8_of(layer, *names)
        if scheme is not None and scheme.granularity is not Granularity.BLOCK:
            raise CheckpointError(
                f"FP8 experts with a weight scale a {scheme.granularity} are not supported; the"
                f" nearest supported format is {BLOCKS}."
            )
        return scheme

    @property
    def softmax_scale(self) -> float:
        """Of the query-key products."""
        return float((self.nope_dim + self.rope_dim) ** -0.5) * self.softmax_mscale**2

    @property
    def num_parameters(self) -> int:
        """Of the layers that predict the next token; numbers, however many bits each takes."""
        hidden, heads = self.hidden_size, self.num_heads
        attention = hidden * (self.query_rank + self.latent_rank + self.rope_dim)
        attention += self.query_rank * heads * (self.nope_dim + self.rope_dim)
        attention += self.latent_rank * heads * (self.nope_dim + self.value_dim)
        attention += heads * self.value_dim * hidden + self.query_rank + self.latent_rank
        if self.attention_bias:
            attention += self.query_rank + self.latent_rank + self.rope_dim + hidden
        dense = 3 * hidden * self.intermediate_size
        experts = self.num_experts + self.num_shared_experts
        mixture = 3 * hidden * self.expert_size * experts + self.num_experts * (hidden + 1)
        num_mixtures = self.num_layers - self.num_dense_layers
        layers = self.num_layers * (attention + 2 * hidden)
        layers += self.num_dense_layers * dense + num_mixtures * mixture
        return layers + 2 * self.vocab_size * hidden + hidden

    def geometry(self, name: str = "") -> ModelGeometry:
        """`name`: the architecture and size when empty, such as "deepseek_v3-671.0B"."""
        count = self.num_parameters
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
        group = KVGroup(
            name="latent",
            layers=tuple(range(self.num_layers + self.has_mtp)),
            num_kv_heads=1,
            head_dim=self.latent_rank + self.rope_dim,
            is_latent=True,
        )
        return ModelGeometry(
            name=name or f"deepseek_v3-{size}",
            architecture="deepseek_v3",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            num_parameters=count,
            kv_groups=(group,),
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            num_mtp_layers=self.num_mtp_layers,
        )


def _check_groups(num_experts: int, num_groups: int, top_groups: int, top_k: int) -> None:
    group_size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and group_size < 2):
        raise wrong(
            "n_group", f"a divisor of n_routed_experts ({num_experts}) that leaves two a group",
            num_groups,
        )  # fmt: skip
    if top_groups > num_groups:
        raise wrong("topk_group", f"at most n_group ({num_groups})", top_groups)
    if top_k > group_size * top_groups:
        raise wrong(
            "num_experts_per_tok", f"at most {group_size * top_groups}, the experts of"
            " topk_group groups", top_k,
        )  # fmt: skip


def _count(keys: ConfigKeys, key: str, default: int) -> int:
    value = keys.raw(key)
    return default if value is None else 0 if value == 0 else keys.positive(key)


def _softmax_mscale(keys: ConfigKeys, config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not rope.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(keys.rope_number("factor"), keys.rope_number("mscale_all_dim"))
