# SPDX-License-Identifier: Apache-2.0
"""How a published FP8 checkpoint stores its weights, read from config.json. Needs no torch.

Weights are e4m3 with float32 scales: one for a tensor, one for a row (output channel), or one for
a block of 128 x 128. Activations are quantised as they come, one scale for a token or, beside
block weights, for 128 neighbours of a token: also where a checkpoint holds a fixed scale for all
tokens, which is coarser. A layout that would compute something else is refused, with the nearest
one that works.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pelton.core.errors import CheckpointError

_EXPRESSION = "re:"
BLOCK_SIZE = 128
"""Rows and columns that share a scale in the block format, and activations that do."""
HIGHEST = 448.0
"""The largest finite e4m3 number."""
DYNAMIC = "compressed-tensors FP8 with dynamic activations (FP8-dynamic)"
BLOCKS = f"fp8 with weight_block_size [{BLOCK_SIZE}, {BLOCK_SIZE}]"
_INT4 = "the unquantised checkpoint with --quantization int4"
_INT8 = "the unquantised checkpoint with --quantization int8"
_NEAREST = {"awq": _INT4, "gptq": _INT4, "bitsandbytes": _INT8}
"""For a dense model; the rest, and models with experts, are nearest to an FP8 format."""


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


def read_fp8_scheme(config: Mapping[str, Any], nearest: str = DYNAMIC) -> FP8Scheme | None:
    """The FP8 scheme of a config.json; None where it has no quantization_config. Raises
    `CheckpointError` for a format that is not supported, and names `nearest` as the one that is."""
    settings = config.get("quantization_config") or config.get("compression_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    read = _READERS.get(str(method))
    if read is None or not isinstance(settings, dict):
        algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
        detail = f" with quant_algo {algorithm!r}" if algorithm else ""
        other = _NEAREST.get(str(method), nearest) if nearest == DYNAMIC else nearest
        raise _unsupported(f"{method!r}{detail}", other)
    return read(settings, nearest)


def _fp8(settings: Mapping[str, Any], nearest: str) -> FP8Scheme:
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _unsupported(f"fp8 with activation_scheme {scheme!r}", nearest)
    if settings.get("fmt", "e4m3") != "e4m3":
        raise _unsupported(f"fp8 in {settings['fmt']}", "fp8 in e4m3")
    skipped = _skipped(settings, "modules_to_not_convert") or _skipped(settings, "ignored_layers")
    block = settings.get("weight_block_size")
    if block is None:
        return FP8Scheme(granularity=Granularity.TENSOR, skipped=skipped)
    _check_block(block)
    return FP8Scheme(granularity=Granularity.BLOCK, scale_name="weight_scale_inv", skipped=skipped)


def _fbgemm_fp8(settings: Mapping[str, Any], nearest: str) -> FP8Scheme:
    bound = settings.get("activation_scale_ub")
    is_number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
    if bound is not None and (not is_number or not 0 < bound < math.inf):
        raise _wrong("activation_scale_ub", "a positive number", bound)
    return FP8Scheme(
        granularity=Granularity.CHANNEL,
        skipped=_skipped(settings, "modules_to_not_convert"),
        activation_bound=math.inf if bound is None else float(bound),
    )


def _compressed_tensors(settings: Mapping[str, Any], nearest: str) -> FP8Scheme:
    groups = list(_object(settings, "config_groups").values())
    layout = settings.get("format")
    if layout != "float-quantized":
        kinds = {_kind(_object(group, "weights")) for group in groups if isinstance(group, dict)}
        detail = f" with weights in {', '.join(sorted(kinds))}" if kinds else ""
        raise _unsupported(f"compressed-tensors {layout!r}{detail}", nearest)
    sparsity = _object(settings, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        raise _unsupported(f"compressed-tensors with {sparsity!r} sparsity", nearest)
    if len(groups) != 1 or not isinstance(groups[0], dict) or groups[0].get("targets") != _ALL:
        raise _unsupported("compressed-tensors with several groups of layers", nearest)
    weights, inputs = _object(groups[0], "weights"), _object(groups[0], "input_activations")
    for part, values in (("weights", weights), ("activations", inputs)):
        if _kind(values) != "float8" or values.get("symmetric", True) is not True:
            raise _unsupported(f"compressed-tensors with {part} in {_kind(values)}", nearest)
    strategy = weights.get("strategy")
    if strategy not in tuple(Granularity):
        raise _unsupported(f"compressed-tensors FP8 with a weight scale a {strategy}", nearest)
    if strategy == Granularity.BLOCK:
        _check_block(weights.get("block_structure"))
    return FP8Scheme(granularity=Granularity(strategy), skipped=_skipped(settings, "ignore"))


_READERS = {"fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "compressed-tensors": _compressed_tensors}
_ALL = ["Linear"]


def _kind(values: Mapping[str, Any]) -> str:
    """Such as "int4"; "no format" where nothing is quantised."""
    return f"{values.get('type', 'int')}{values.get('num_bits', 8)}" if values else "no format"


def _object(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(key, "an object", value)
    return value


def _check_block(block: Any) -> None:
    if block != [BLOCK_SIZE, BLOCK_SIZE]:
        raise _unsupported(f"fp8 in blocks of {block}", f"blocks of [{BLOCK_SIZE}, {BLOCK_SIZE}]")


def _skipped(settings: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = settings.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _wrong(key, "a list of modules' names", names)
    for name in names:
        if name.startswith(_EXPRESSION):
            try:
                re.compile(name.removeprefix(_EXPRESSION))
            except re.error as error:
                raise _wrong(key, f"regular expressions that compile ({error})", name) from error
    return tuple(names)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(_EXPRESSION):
        return re.match(pattern.removeprefix(_EXPRESSION), module) is not None
    return f".{pattern}." in f".{module}."


def _unsupported(found: str, nearest: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint's weights are stored in a format that is not supported, {found} in "
        f"quantization_config; the nearest supported one is {nearest}."
    )


def _wrong(key: str, allowed: str, value: Any) -> CheckpointError:
    found = repr(value)[:120]
    return CheckpointError(f"{key} in quantization_config must be {allowed}, got {found}.")
