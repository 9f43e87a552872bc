# SPDX-License-Identifier: Apache-2.0
"""The sizes and constants of a GPT-OSS model, read from Hugging Face's config.json keys.

Needs no torch. A setting that would change the numbers and is not implemented is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pelton.core.errors import CheckpointError
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.models.config_keys import ConfigKeys, wrong

WINDOWED, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    num_experts: int
    top_k: int
    """Experts a token goes to."""
    window: int
    """Most recent tokens that a windowed layer attends to, the current one included."""
    windowed_layers: tuple[int, ...]
    has_mxfp4_experts: bool
    """Whether the checkpoint stores experts in MXFP4; else in its dtype."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_factors: tuple[float, ...] = ()
    rope_magnitude: float = 1.0
    attention_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Raises `CheckpointError` for a missing, ill-typed or unsupported setting."""
        keys = ConfigKeys(config)
        keys.refuse_unless("hidden_act", ("silu",), "silu")
        keys.refuse_unless("tie_word_embeddings", (False,), False)
        keys.refuse_unless("partial_rotary_factor", (1.0,), 1.0)
        num_layers = keys.positive("num_hidden_layers")
        num_heads, num_kv_heads = (
            keys.positive("num_attention_heads"),
            keys.positive("num_key_value_heads"),
        )
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})."
            )
        head_dim = keys.positive("head_dim", 64)
        if head_dim % 2:
            raise wrong("head_dim", "even for rotary positions", head_dim)
        num_experts = keys.positive("num_local_experts")
        top_k = keys.positive("num_experts_per_tok")
        if top_k > num_experts:
            raise wrong("num_experts_per_tok", f"at most num_local_experts ({num_experts})", top_k)
        has_yarn = keys.rope_kind() == "yarn"
        return cls(
            num_layers=num_layers,
            hidden_size=keys.positive("hidden_size"),
            intermediate_size=keys.positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=keys.positive("vocab_size"),
            max_context=keys.positive("max_position_embeddings"),
            num_experts=num_experts,
            top_k=top_k,
            window=keys.positive("sliding_window", 128),
            windowed_layers=_windowed_layers(keys, num_layers),
            has_mxfp4_experts=_has_mxfp4_experts(keys),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-5),
            rope_theta=keys.rope_theta(),
            rope_factors=keys.yarn_factors(head_dim) if has_yarn else keys.rope_factors(head_dim),
            rope_magnitude=keys.yarn_magnitude() if has_yarn else 1.0,
            attention_bias=keys.flag("attention_bias", True),
            swiglu_alpha=keys.number("swiglu_alpha", 1.702),
            swiglu_limit=keys.number("swiglu_limit", 7.0),
            dtype=keys.text("dtype", keys.text("torch_dtype", "bfloat16")),
            bos_token_id=keys.token_id("bos_token_id"),
            eos_token_ids=keys.token_ids("eos_token_id"),
        )

    @property
    def num_parameters(self) -> int:
        """Numbers, however many bits each is stored in."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        attention += (query + 2 * kv + self.hidden_size) * self.attention_bias + self.num_heads
        hidden, ffn = self.hidden_size, self.intermediate_size
        expert = 3 * hidden * ffn + 2 * ffn + hidden
        router = self.num_experts * (hidden + 1)
        layer = attention + router + self.num_experts * expert + 2 * hidden
        return self.num_layers * layer + 2 * self.vocab_size * hidden + hidden

    def geometry(self, name: str = "") -> ModelGeometry:
        """`name`: the architecture and size when empty, such as "gpt_oss-20.9B"."""
        count = self.num_parameters
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
        return ModelGeometry(
            name=name or f"gpt_oss-{size}",
            architecture="gpt_oss",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            num_parameters=count,
            kv_groups=self.kv_groups,
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
        )

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        full = tuple(layer for layer in range(self.num_layers) if layer not in self.windowed_layers)
        layers_of = {"window": self.windowed_layers, "full": full}
        return tuple(
            KVGroup(
                name=name,
                layers=layers,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=self.window if name == "window" else 0,
            )
            for name, layers in layers_of.items()
            if layers
        )


def _windowed_layers(keys: ConfigKeys, num_layers: int) -> tuple[int, ...]:
    kinds = keys.raw("layer_types")
    if kinds is None:
        return tuple(range(0, num_layers, 2))
    is_list = isinstance(kinds, list) and all(kind in (WINDOWED, FULL) for kind in kinds)
    if not is_list or len(kinds) != num_layers:
        raise wrong("layer_types", f"a list of {num_layers} of '{WINDOWED}' and '{FULL}'", kinds)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)


def _has_mxfp4_experts(keys: ConfigKeys) -> bool:
    quantization = keys.raw("quantization_config")
    if quantization is None:
        return False
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != "mxfp4":
        raise CheckpointError(
            f"The checkpoint's weights are stored in a format that GPT-OSS is not supported in,"
            f" {method!r} in quantization_config; the nearest supported one is 'mxfp4' as"
            " published, or experts in bfloat16 without a quantization_config."
        )
    return True
