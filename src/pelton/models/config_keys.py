# SPDX-License-Identifier: Apache-2.0
"""Typed reads of a Hugging Face config.json, and the rules of rotary positions that it names.

Needs no torch, so that a frontend can read what a model allows.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from pelton.core.errors import CheckpointError

LARGEST = 2**24
"""Of any size that a config names: a larger one is a mistake, and would be allocated."""
_MAX_SHOWN = 120
"""Characters of a wrong value in its error."""
_MOST_LAYERS = 2**10
_LARGEST_COUNT = 2**12
"""Of heads, experts and what multiplies with them."""
_COUNTS = frozenset(
    (
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_local_experts",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
)


class ConfigKeys:
    """Typed reads of config.json; each error names the key and the value."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._rope: Mapping[str, Any] = {}
        # Older files say rope_scaling beside rope_theta, newer ones rope_parameters holding both.
        for key in ("rope_scaling", "rope_parameters"):
            value = config.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise wrong(key, "an object", value)
            self._rope = value

    def raw(self, key: str) -> Any:
        return self._config.get(key)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if not is_int(value) or value < 1:
            raise wrong(key, "a positive integer", value)
        largest = _LARGEST_COUNT if key in _COUNTS else LARGEST
        if key == "num_hidden_layers":
            largest = _MOST_LAYERS
        if value > largest:
            raise wrong(key, f"at most {largest}", value)
        return value

    def number(self, key: str, default: float) -> float:
        return positive_number(key, self._config.get(key, default))

    def flag(self, key: str, default: bool) -> bool:
        return _flag(key, self._config.get(key, default))

    def text(self, key: str, default: str) -> str:
        value = self._config.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise wrong(key, "a string", value)
        return value

    def token_id(self, key: str) -> int | None:
        value = self._config.get(key)
        if value is not None and not (is_int(value) and value >= 0):
            raise wrong(key, "a token id", value)
        return value if value is None or self._can_come(value) else None

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(item) and item >= 0 for item in ids):
            raise wrong(key, "a token id or a list of them", value)
        return tuple(filter(self._can_come, ids))

    def _can_come(self, token_id: int) -> bool:
        """Whether the vocabulary has it: others are left out, as logits have no place for them."""
        return token_id < self.positive("vocab_size")

    def refuse_unless(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        value = self._config.get(key, default)
        if value not in allowed:
            raise wrong(key, " or ".join(repr(item) for item in allowed), value)

    def rope_theta(self) -> float:
        value = self._rope.get("rope_theta", self._config.get("rope_theta", 10000.0))
        if positive_number("rope_theta", value) <= 1:
            raise wrong("rope_theta", "a number above 1", value)
        return float(value)

    def rope_factors(self, head_dim: int) -> tuple[float, ...]:
        rope, kind = self._rope, self.rope_kind()
        if self._config.get("partial_rotary_factor", 1.0) != 1.0:
            raise wrong("partial_rotary_factor", "1.0", self._config["partial_rotary_factor"])
        if kind == "default":
            return ()
        half = head_dim // 2
        if kind == "linear":
            return (positive_number("rope_scaling.factor", rope.get("factor")),) * half
        if kind == "factors":
            factors = rope.get("factors")
            if not isinstance(factors, list) or len(factors) != half:
                raise wrong("rope_scaling.factors", f"a list of {half} numbers", factors)
            return tuple(positive_number("rope_scaling.factors", item) for item in factors)
        if kind == "llama3":
            return self._llama3_factors(head_dim)
        raise wrong("rope_scaling.rope_type", "'default', 'linear' or 'llama3'", kind)

    def _llama3_factors(self, head_dim: int) -> tuple[float, ...]:
        """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, and the
        band between is blended by how often a wave fits the original context."""
        names = (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        factor, low, high, context = (
            positive_number(f"rope_scaling.{name}", self._rope.get(name)) for name in names
        )
        if high <= low:
            raise wrong("rope_scaling.high_freq_factor", f"above low_freq_factor ({low:g})", high)
        theta = self.rope_theta()
        factors = []
        for pair in range(head_dim // 2):
            turns = context / (2 * math.pi * theta ** (2 * pair / head_dim))
            blend = min(max((turns - low) / (high - low), 0.0), 1.0)
            factors.append(1 / ((1 - blend) / factor + blend))
        return tuple(factors)

    def rope_kind(self) -> str:
        """ "default" where nothing is said."""
        kind = self._rope.get("rope_type", self._rope.get("type"))
        if kind is None and "factor" not in self._rope:
            return "default"
        if not isinstance(kind, str):
            raise wrong("rope_scaling.rope_type", "the name of a rule", kind)
        return kind

    def rope_number(self, key: str, default: float | None = None) -> float:
        """A positive number of the rope's own settings; they must have it if there is no
        default."""
        value = self._rope.get(key)
        return positive_number(f"rope_scaling.{key}", default if value is None else value)

    def yarn_factors(self, head_dim: int) -> tuple[float, ...]:
        """The divisors of the frequencies under YaRN (Peng et al., "YaRN: Efficient Context Window
        Extension of Large Language Models", 2023, equations 17 to 23): pairs that turn more than
        `beta_fast` times within the original context keep their frequency, those that turn fewer
        than `beta_slow` times are stretched by `factor`, with a ramp over the pairs between."""
        factor = self.rope_number("factor")
        context = self.rope_number("original_max_position_embeddings")
        theta = self.rope_theta()

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

        low = pair_that_turns(self.rope_number("beta_fast", 32.0))
        high = pair_that_turns(self.rope_number("beta_slow", 1.0))
        if _flag("rope_scaling.truncate", self._rope.get("truncate", True)):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        factors = []
        for pair in range(head_dim // 2):
            stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
            factors.append(1 / (stretched / factor + 1 - stretched))
        return tuple(factors)

    def yarn_magnitude(self) -> float:
        """What cosines and sines are multiplied by, so that attention keeps its sharpness over
        longer contexts (equation 22): the square of it scales the logits."""
        if self._rope.get("attention_factor") is not None:
            return self.rope_number("attention_factor")
        factor = self.rope_number("factor")
        if self._rope.get("mscale") and self._rope.get("mscale_all_dim"):
            scale, all_dims = self.rope_number("mscale"), self.rope_number("mscale_all_dim")
            return yarn_mscale(factor, scale) / yarn_mscale(factor, all_dims)
        return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, and 1 where nothing is stretched."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def positive_number(key: str, value: Any) -> float:
    """What no formula overflows with."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1e-30 < value < 1e30:
        raise wrong(key, "a positive number", value)
    return float(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(key, "true or false", value)
    return value


def wrong(key: str, allowed: str, value: Any) -> CheckpointError:
    found = repr(value)
    if len(found) > _MAX_SHOWN:
        found = found[:_MAX_SHOWN] + "..."
    return CheckpointError(f"{key} in the model's config must be {allowed}, got {found}.")
