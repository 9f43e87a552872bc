# SPDX-License-Identifier: Apache-2.0
"""The step that `pelton roofline` is about: its costs on `meta`, its times on a device."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pelton.bench.ceilings import measure_ceilings
from pelton.core.config import (
    AUTO,
    CacheConfig,
    Device,
    DraftMethod,
    DType,
    KVCacheDType,
    ModelConfig,
    Quantization,
    SpeculativeConfig,
)
from pelton.core.errors import ConfigError
from pelton.core.geometry import ModelGeometry
from pelton.engine.allocation import allocating
from pelton.engine.factory import check_deterministic, load_model, select_device
from pelton.engine.kv.pool import select_cache_dtype
from pelton.engine.resolve import check_drafter, check_kv_cache
from pelton.engine.step_cost import make_batch, step_costs
from pelton.engine.step_timing import StepTimes, time_step
from pelton.kernels.dispatch import batch_invariant
from pelton.models.build import default_dtype
from pelton.models.checkpoint import BUNDLED_MODEL, open_checkpoint
from pelton.models.geometries import GEOMETRIES, find_geometry
from pelton.models.language_model import LanguageModel
from pelton.models.registry import find_architecture
from pelton.perf.cost import CostLog
from pelton.perf.hardware import Hardware
from pelton.quantization.select import (
    select_float32_format,
    select_format,
    select_head_format,
)

_FILL_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Rows alike, in bfloat16 but for what is stored otherwise."""

    name: str
    """A checkpoint or a known geometry, whose weights are random."""
    num_rows: int
    new_tokens: int
    """Of each row; 1: decodes."""
    context_len: int
    """Of each row, the new tokens too."""
    speculative: str
    num_layers: int
    """Only a known geometry's first so many; 0: all."""
    kv_cache_dtype: KVCacheDType
    is_deterministic: bool = False
    """Runs with `--deterministic`."""

    @property
    def drafts(self) -> SpeculativeConfig:
        return SpeculativeConfig(speculative=self.speculative)

    @property
    def is_geometry(self) -> bool:
        return self.name in GEOMETRIES


def cost_step(step: Step) -> CostLog:
    """Raises `ConfigError` for a step that there is not."""
    model, geometry = _outline(step)
    with batch_invariant(wanted=step.is_deterministic):
        return step_costs(
            model,
            geometry,
            num_rows=step.num_rows,
            new_tokens=step.new_tokens,
            context_len=step.context_len,
            block_size=CacheConfig().block_size,
            kv_dtype=select_cache_dtype(step.kv_cache_dtype, torch.bfloat16, torch.device("meta")),
            num_drafts=step.drafts.num_drafts,
        )


def measure_step(step: Step, repeats: int) -> tuple[Hardware, StepTimes]:
    """The device's ceilings and the step's times on it; keys and values are random numbers."""
    device = select_device(Device.AUTO)
    if step.is_deterministic:
        check_deterministic(device)
    hardware = measure_ceilings(device)
    with batch_invariant(wanted=step.is_deterministic):
        return hardware, _time_step_on(device, step, repeats)


def _time_step_on(device: torch.device, step: Step, repeats: int) -> StepTimes:
    config = ModelConfig(
        model=step.name,
        dtype=DType.BFLOAT16,
        random_weights=step.name if step.is_geometry else "",
        layers=step.num_layers or AUTO,
    )
    model, geometry = load_model(
        config,
        device,
        torch.bfloat16,
        speculative=step.drafts,
        kv_cache_dtype=step.kv_cache_dtype,
    )
    kv_dtype = select_cache_dtype(step.kv_cache_dtype, torch.bfloat16, device)
    num_drafts = step.drafts.num_drafts
    with allocating(
        f"keys and values of {step.num_rows} requests of {step.context_len} tokens",
        "lower --batch or --context",
        param="context",
    ):
        batch, next_batch = (
            make_batch(
                geometry,
                step.num_rows,
                count,
                step.context_len,
                block_size=CacheConfig().block_size,
                kv_dtype=kv_dtype,
                is_prompt=not num_drafts,
                device=device,
            )
            for count in (step.new_tokens + num_drafts, 1)
        )
    for group in (*batch.groups, *next_batch.groups):
        _fill(group.cache)
    return time_step(model, batch, next_batch, num_drafts, repeats)


def _outline(step: Step) -> tuple[LanguageModel, ModelGeometry]:
    drafts = step.drafts
    if step.kv_cache_dtype is KVCacheDType.FLOAT32:
        raise ConfigError("--kv-cache-dtype is bfloat16 or fp8 beside bfloat16 activations.")
    if step.new_tokens > step.context_len:
        raise ConfigError("--context counts the new tokens too: it is at least --new-tokens.")
    if drafts.num_drafts and step.new_tokens > 1:
        raise ConfigError(
            "--speculative is about decodes: leave --new-tokens out.", param="speculative"
        )
    if not step.is_geometry and step.num_layers:
        raise ConfigError(
            "--layers cuts a known geometry; leave it out for a checkpoint.", param="layers"
        )
    is_path = len(step.name) < 256 and Path(step.name).expanduser().exists()
    if not (step.is_geometry or is_path or step.name == BUNDLED_MODEL):
        raise ConfigError(
            f"There is no model {step.name[:256]!r}: name a geometry ("
            f"{', '.join(GEOMETRIES)}), a GGUF"
            " file that exists, or a folder with config.json.",
            param="model",
        )
    raw: Mapping[str, Any] = (
        find_geometry(step.name, step.num_layers or None)
        if step.is_geometry
        else open_checkpoint(step.name).config
    )
    architecture = find_architecture(raw)
    config = architecture.config_from_hf(raw)
    check_drafter(drafts, config.geometry(step.name))
    if drafts.method is DraftMethod.MTP:
        assert architecture.with_mtp is not None, architecture
        config = architecture.with_mtp(config)
    geometry = config.geometry(step.name)
    check_kv_cache(step.kv_cache_dtype, geometry)
    if step.context_len > geometry.max_context:
        raise ConfigError(
            f"{step.name} was made for {geometry.max_context} tokens; lower --context."
        )
    with torch.device("meta"), default_dtype(torch.bfloat16):
        model = architecture.build(config)
        gpu = Quantization.NONE, torch.bfloat16, torch.device("cuda")
        model.pack(select_format(*gpu), select_head_format(*gpu), select_float32_format(*gpu))
    return model, geometry


def _fill(cache: torch.Tensor) -> None:
    flat = cache.view(-1)
    for start in range(0, flat.shape[0], _FILL_ELEMENTS):
        part = flat[start : start + _FILL_ELEMENTS]
        part.copy_(torch.randn(part.shape, device=part.device))
