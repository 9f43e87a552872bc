# SPDX-License-Identifier: Apache-2.0
"""How a published FP8 checkpoint stores its weights, read from config.json. Needs no torch.

Weights are e4m3 with float32 scales: one for a tensor, one for a row (output channel), or one for
a block of 128 x 128. Activations are quantised as they come, one scale for a token or, beside
block weights, for 128 neighbours of a token. A layout that would compute something else is
refused, with the nearest one that works.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pelton.core.errors import CheckpointError

BLOCK_SIZE = 128
"""Rows and columns that share a scale in the block format, and activations that do."""
HIGHEST = 448.0
"""The largest finite e4m3 number."""
_DYNAMIC = "compressed-tensors FP8 with dynamic activations (FP8-dynamic)"
_NEAREST = {
    "awq": "the unquantised checkpoint with --quantization int4",
    "gptq": "the unquantised checkpoint with --quantization int4",
    "bitsandbytes": "the unquantised checkpoint with --quantization int8",
    "modelopt": _DYNAMIC,
    "quark": _DYNAMIC,
    "mxfp4": _DYNAMIC,
}


class Granularity(StrEnum):
    """What shares a weight scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Scheme:
    granularity: Granularity
    scale_name: str = "weight_scale"
    """Last part of the name of a weight's scales in the checkpoint."""
    skipped: tuple[str, ...] = ()
    """Modules that are not quantised: their names, a leading or trailing part of them, or a
    regular expression after "re:"."""
    activation_bound: float = math.inf
    """Magnitude above which activations are clipped before a token's scale is chosen."""

    def covers(self, module: str) -> bool:
        """Whether the weight of `module` ("model.layers.0.mlp.up_proj") is stored in FP8."""
        return not any(_matches(pattern, module) for pattern in self.skipped)


def scheme_of(scheme: FP8Scheme | None, modules: Sequence[str]) -> FP8Scheme | None:
    """The scheme of a product that fuses `modules`; None: it is not quantised. Raises
    `CheckpointError` where only some of them are quantised."""
    covered = [scheme is not None and scheme.covers(module) for module in modules]
    if any(covered) and not all(covered):
        mixed = ", ".join(name for name, is_covered in zip(modules, covered, strict=True)
                          if not is_covered)  # fmt: skip
        raise CheckpointError(
            f"quantization_config leaves {mixed} unquantised but not the products it is fused "
            "with; supported is a checkpoint that quantises all of them or none."
        )
    return scheme if all(covered) else None


def read_fp8_scheme(config: Mapping[str, Any]) -> FP8Scheme | None:
    """The FP8 scheme of a config.json; None where it has no quantization_config. Raises
    `CheckpointError` for a format that is not supported."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise _unsupported(f"of the kind {settings!r}", _DYNAMIC)
    method = str(settings.get("quant_method", "")).lower()
    if method == "fp8":
        return _fp8(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    if method == "fbgemm_fp8":
        bound = settings.get("activation_scale_ub")
        return FP8Scheme(
            granularity=Granularity.CHANNEL,
            skipped=_skipped(settings.get("modules_to_not_convert")),
            activation_bound=math.inf if bound is None else float(bound),
        )
    raise _unsupported(repr(method), _NEAREST.get(method, _DYNAMIC))


def _fp8(settings: Mapping[str, Any]) -> FP8Scheme:
    nearest = "fp8 with activation_scheme 'dynamic'"
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        raise _unsupported(f"fp8 with {settings['activation_scheme']} activations", nearest)
    if settings.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fp8 in {settings['fmt']}", "fp8 in e4m3")
    skipped = _skipped(settings.get("modules_to_not_convert") or settings.get("ignored_layers"))
    block = settings.get("weight_block_size")
    if block is None:
        return FP8Scheme(granularity=Granularity.TENSOR, skipped=skipped)
    _check_block(block)
    return FP8Scheme(granularity=Granularity.BLOCK, scale_name="weight_scale_inv", skipped=skipped)


def _compressed_tensors(settings: Mapping[str, Any]) -> FP8Scheme:
    layout = settings.get("format")
    if layout != "float-quantized":
        raise _unsupported(f"compressed-tensors {layout!r}", _DYNAMIC)
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("targets") != ["Linear"]:
        raise _unsupported("compressed-tensors with several groups of layers", _DYNAMIC)
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    for part, values in (("weights", weights), ("activations", inputs)):
        kind = f"{values.get('type')}{values.get('num_bits')}"
        if kind != "float8" or not values.get("symmetric", True):
            raise _unsupported(f"compressed-tensors with {part} in {kind}", _DYNAMIC)
    if not inputs.get("dynamic"):
        raise _unsupported("compressed-tensors FP8 with static activations", _DYNAMIC)
    strategy = weights.get("strategy")
    if strategy not in tuple(Granularity):
        raise _unsupported(f"compressed-tensors FP8 with a weight scale a {strategy}", _DYNAMIC)
    if strategy == Granularity.BLOCK:
        _check_block(weights.get("block_structure"))
    return FP8Scheme(granularity=Granularity(strategy), skipped=_skipped(settings.get("ignore")))


def _check_block(block: Any) -> None:
    if block != [BLOCK_SIZE, BLOCK_SIZE]:
        raise _unsupported(f"fp8 in blocks of {block}", f"blocks of [{BLOCK_SIZE}, {BLOCK_SIZE}]")


def _skipped(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list):
        return ()
    return tuple(name for name in names if isinstance(name, str) and name)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."


def _unsupported(found: str, nearest: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's weights are stored in a format that is not supported, {found} in "
        f"quantization_config; the nearest supported one is {nearest}."
    )
