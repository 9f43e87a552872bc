# SPDX-License-Identifier: Apache-2.0
"""Scales of keys and values for an FP8 cache, from a checkpoint that was calibrated for one.

A layer has one for its keys and one for its values, under the names that quantisers have used:
self_attn.k_scale, self_attn.k_proj.k_scale, self_attn.k_proj.output_scale, likewise for values,
and self_attn.kv_scale for both.
"""

import logging
import math
import re
from typing import TYPE_CHECKING, Any

from pelton.core.errors import CheckpointError
from pelton.layers.attention import PagedAttention
from pelton.models.checkpoint import Checkpoint

if TYPE_CHECKING:
    from torch import nn

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Endings of their names."""
_PLACE = re.compile(r"model\.layers\.(\d+)\.self_attn\..*?(kv|k|v)_(?:proj\.output_)?scale")
_log = logging.getLogger("pelton.models")


def load_kv_scales(model: "nn.Module", checkpoint: Checkpoint) -> None:
    """Gives every attention layer its scales; 1 where the checkpoint has none at all. Raises
    `CheckpointError` for scales of some layers only, and for those that are not one positive
    number a layer."""
    config = checkpoint.config
    settings = config.get("quantization_config") or config.get("compression_config")
    scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    if isinstance(scheme, dict):
        _check_scheme(checkpoint, scheme)
    layers = [
        attend
        for module in model.modules()
        if isinstance(attend := getattr(module, "attend", None), PagedAttention)
    ]
    scales: dict[tuple[int, str], float] = {}
    for name in checkpoint.tensor_names:
        if name.endswith(KV_SCALES):
            place = _PLACE.fullmatch(name)
            if place is None or int(place[1]) >= len(layers):
                raise CheckpointError(
                    f"{checkpoint.path} holds {name}, a scale of no layer's KV;"
                    " use --kv-cache-dtype auto."
                )
            for kind in place[2]:
                scales[int(place[1]), kind] = _read(checkpoint, name)
    if len(scales) not in (0, 2 * len(layers)) or (scheme and not scales):
        raise CheckpointError(
            f"{checkpoint.path} holds {len(scales)} of the {2 * len(layers)} scales that an FP8"
            " cache needs for its keys and values; use --kv-cache-dtype auto."
        )
    for (layer, kind), scale in scales.items():
        setattr(layers[layer], f"{kind}_scale", scale)
    _log.info("kv_cache=fp8 scales=%s", "checkpoint" if scales else "1.0")


def _read(checkpoint: Checkpoint, name: str) -> float:
    tensor = checkpoint.read(name)
    if tensor.numel() == 1 and 0 < (scale := float(tensor)) < math.inf:
        return scale
    raise CheckpointError(
        f"{name} in {checkpoint.path} must be one positive number, the layer's scale;"
        " use --kv-cache-dtype auto."
    )


def _check_scheme(checkpoint: Checkpoint, scheme: dict[str, Any]) -> None:
    kind = f"{scheme.get('type', 'float')}{scheme.get('num_bits', 8)}"
    strategy = scheme.get("strategy", "tensor")
    if kind != "float8" or strategy != "tensor" or not scheme.get("symmetric", True):
        raise CheckpointError(
            f"{checkpoint.path} was calibrated for a KV cache in {kind} with a scale a {strategy}"
            " (kv_cache_scheme), and fp8 here is float8 with one a layer;"
            " use --kv-cache-dtype auto."
        )
