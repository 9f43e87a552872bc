# SPDX-License-Identifier: Apache-2.0
"""The sizes and constants of a Llama-family model, read from Hugging Face's config.json keys.

Covers Llama, Mistral (sliding window) and Qwen2 (biased query, key and value). Needs no torch, so
that a frontend can ask for the context length and the end-of-sequence tokens. A setting that would
change the numbers and is not implemented is refused, never ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pelton.core.errors import CheckpointError
from pelton.core.geometry import KVGroup, ModelGeometry
from pelton.models.config_keys import ConfigKeys, is_int, wrong
from pelton.quantization.fp8_scheme import FP8Scheme, read_fp8_scheme, scheme_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] = ()
    """Divisors of the head_dim / 2 inverse frequencies; empty: all 1."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    window: int = 0
    """Most recent tokens a layer attends to, the current one included; 0: all."""
    fp8: FP8Scheme | None = None
    """How the products' weights are stored; None: in `dtype`."""
    dtype: str = "bfloat16"
    """Format the weights were published in."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Config":
        """Raises `CheckpointError` for a missing, ill-typed or unsupported setting."""
        keys = ConfigKeys(config)
        model_type = keys.text("model_type", "llama")
        keys.refuse_unless("hidden_act", ("silu",), "silu")
        keys.refuse_unless("mlp_bias", (False,), False)
        hidden_size = keys.positive("hidden_size")
        num_heads = keys.positive("num_attention_heads")
        head_dim = keys.positive("head_dim", hidden_size // num_heads)
        num_kv_heads = keys.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
                f"({num_kv_heads})."
            )
        if head_dim % 2:
            raise CheckpointError(f"head_dim must be even for rotary positions, got {head_dim}.")
        is_qwen2 = model_type == "qwen2"
        attention_bias = keys.flag("attention_bias", False)
        num_layers = keys.positive("num_hidden_layers")
        return cls(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=keys.positive("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=keys.positive("vocab_size"),
            max_context=keys.positive("max_position_embeddings", 2048),
            rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
            rope_theta=keys.rope_theta(),
            rope_factors=keys.rope_factors(head_dim),
            tie_word_embeddings=keys.flag("tie_word_embeddings", False),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            window=_window(keys, num_layers),
            fp8=read_fp8_scheme(config),
            dtype=keys.text("dtype", keys.text("torch_dtype", "bfloat16")),
            bos_token_id=keys.token_id("bos_token_id"),
            eos_token_ids=keys.token_ids("eos_token_id"),
        )

    def fp8_of(self, layer: int, *products: str) -> FP8Scheme | None:
        """How the fused weights of `products` ("mlp.up_proj") are stored in a layer."""
        return scheme_of(self.fp8, [f"model.layers.{layer}.{name}" for name in products])

    @property
    def num_parameters(self) -> int:
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        attention += (query + 2 * kv) * self.qkv_bias + self.hidden_size * self.output_bias
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    def geometry(self, name: str = "") -> ModelGeometry:
        """`name`: the architecture and size when empty, such as "llama-135M"."""
        count = self.num_parameters
        size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
        group = KVGroup(
            name="window" if self.window else "full",
            layers=tuple(range(self.num_layers)),
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            window=self.window,
        )
        return ModelGeometry(
            name=name or f"{self.model_type}-{size}",
            architecture=self.model_type,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            num_parameters=count,
            kv_groups=(group,),
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
        )


def _window(keys: ConfigKeys, num_layers: int) -> int:
    value = keys.raw("sliding_window")
    if value is None or not keys.flag("use_sliding_window", True):
        return 0
    if not is_int(value) or value < 1:
        raise wrong("sliding_window", "a positive integer", value)
    model_type = keys.raw("model_type")
    if model_type == "llama":
        raise wrong("sliding_window", "absent for model_type 'llama'", value)
    # Qwen2 gives the window only to layers from max_window_layers on.
    if model_type == "qwen2":
        first = keys.raw("max_window_layers")
        first = 28 if first is None else first
        if not is_int(first):
            raise wrong("max_window_layers", "an integer", first)
        if first >= num_layers:
            return 0
        if first > 0:
            raise wrong("max_window_layers", f"0 or at least {num_layers} (all layers)", first)
    return value
