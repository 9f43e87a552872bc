# SPDX-License-Identifier: Apache-2.0
"""Models of a real geometry with random weights: for measuring speed where no checkpoint is.

Every parameter is drawn on the device itself, in the format it is stored in, so nothing is read or
copied and the host holds no weight. Whatever is measured on such a model must be labelled random.
`RULES` says what a parameter is filled with, by the end of its name; a format that is not a plain
number needs a rule of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from pelton.core.geometry import ModelGeometry
from pelton.layers.moe.router import Router
from pelton.models.build import build_model
from pelton.models.geometries import GEOMETRIES, find_geometry
from pelton.models.language_model import LanguageModel
from pelton.models.registry import find_architecture

__all__ = ["GEOMETRIES", "RULES", "find_geometry", "make_random_model", "measure_router_spread"]

STANDARD_DEVIATION = 0.02
ROUTER_BIAS_DEVIATION = 0.3
"""Makes some experts several times as popular as others, as training does."""

CORRECTION_BIAS_DEVIATION = 0.02
"""Of the bias that steers a sigmoid router's choice: likewise."""
FP8_SCALE = STANDARD_DEVIATION
_FP8_CHUNK = 2**24
"""Elements drawn at a time."""

Fill = Callable[[Tensor, Generator], object]


def _fill_matrix(parameter: Tensor, generator: Generator) -> None:
    parameter.normal_(0.0, STANDARD_DEVIATION, generator=generator)


def _fill_ones(parameter: Tensor, generator: Generator) -> None:
    parameter.fill_(1.0)


def _fill_zeros(parameter: Tensor, generator: Generator) -> None:
    parameter.zero_()


def _fill_sinks(parameter: Tensor, generator: Generator) -> None:
    parameter.normal_(0.0, 1.0, generator=generator)


def _fill_router_bias(parameter: Tensor, generator: Generator) -> None:
    parameter.normal_(0.0, ROUTER_BIAS_DEVIATION, generator=generator)


def _fill_mxfp4_blocks(parameter: Tensor, generator: Generator) -> None:
    """Every code as often as any other: an RMS of 2.9 before the scale."""
    parameter.random_(0, 256, generator=generator)


def _fill_mxfp4_scales(parameter: Tensor, generator: Generator) -> None:
    """2^-8 or 2^-7: with them the weights' RMS is 0.018."""
    parameter.random_(119, 121, generator=generator)


def _fill_fp8_scales(parameter: Tensor, generator: Generator) -> None:
    """With them the weights' RMS is that of others."""
    parameter.uniform_(0.75 * FP8_SCALE, 1.25 * FP8_SCALE, generator=generator)


def _fill_fp8(parameter: Tensor, generator: Generator) -> None:
    """Normal before the scale, drawn a few rows at a time, so that no wide copy is ever held."""
    rows = parameter.flatten(0, -2)
    num_rows = max(_FP8_CHUNK // rows.shape[1], 1)
    for start in range(0, rows.shape[0], num_rows):
        part = rows[start : start + num_rows]
        part.copy_(torch.randn(part.shape, device=part.device, generator=generator))


def _fill_correction_bias(parameter: Tensor, generator: Generator) -> None:
    parameter.normal_(0.0, CORRECTION_BIAS_DEVIATION, generator=generator)


RULES: dict[str, Fill] = {
    "norm.weight": _fill_ones,
    "attention.sinks": _fill_sinks,
    "router.logits.bias": _fill_router_bias,
    "correction_bias": _fill_correction_bias,
    "_scale": _fill_fp8_scales,
    "_blocks": _fill_mxfp4_blocks,
    "_scales": _fill_mxfp4_scales,
    "bias": _fill_zeros,
}
"""By the end of a parameter's name; the first that fits counts. The rest are matrices."""


def make_random_model(
    name: str,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    has_mtp: bool = False,
) -> tuple[LanguageModel, ModelGeometry]:
    """The same seed, device type and dtype give the same weights. Not packed yet. `has_mtp`: with
    its MTP layer, which the geometry must have."""
    architecture = find_architecture(config)
    model_config = architecture.config_from_hf(config)
    if has_mtp:
        assert architecture.with_mtp is not None, architecture
        model_config = architecture.with_mtp(model_config)
    model = build_model(architecture, model_config, device, dtype, name=name)
    generator = Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _rule_for(parameter_name, parameter)(parameter, generator)
    return model, model_config.geometry(f"{name} (random weights)")


def _rule_for(name: str, parameter: Tensor) -> Fill:
    for ending, fill in RULES.items():
        if name.endswith(ending):
            return fill
    if parameter.dtype is torch.float8_e4m3fn:
        return _fill_fp8
    assert parameter.dtype.is_floating_point, f"no rule fills {name} of {parameter.dtype}"
    assert parameter.dtype.itemsize >= 2, f"no rule fills {name} of {parameter.dtype}"
    return _fill_matrix


@dataclass(frozen=True, slots=True)
class RouterSpread:
    """Over all layers, of tokens whose hidden states are independent and normal."""

    busiest: float
    """Rows of a layer's busiest expert over an expert's even share, on average."""
    idle: float
    """Share of experts that got no row."""

    def __str__(self) -> str:
        return f"busiest expert {self.busiest:.1f}x its share, {self.idle:.0%} of experts idle"


@torch.inference_mode()
def measure_router_spread(
    model: LanguageModel, num_tokens: int = 1024, seed: int = 0
) -> RouterSpread | None:
    """How a model's routers spread tokens over experts; None for a model without routers. An even
    spread would be 1.0x and 0%; a collapsed one sends everything to a few."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        return None
    parameter = next(iter(model.parameters()))
    generator = Generator(parameter.device).manual_seed(seed)
    busiest = idle = 0.0
    for router in routers:
        x = torch.empty(
            (num_tokens, router.hidden_size), dtype=parameter.dtype, device=parameter.device
        ).normal_(generator=generator)
        expert_ids, _ = router(x).choose()
        counts = torch.bincount(expert_ids.flatten(), minlength=router.num_experts).float()
        busiest += float(counts.max() / counts.mean())
        idle += float((counts == 0).float().mean())
    return RouterSpread(busiest / len(routers), idle / len(routers))
