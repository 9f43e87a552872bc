# SPDX-License-Identifier: Apache-2.0
"""Makes a model whose parameters are to be filled, once it is known to fit.

The model is first outlined on `meta`, where nothing is allocated: a checkpoint that has other
tensors, or weights that the device has no room for, end there with a sentence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import psutil
import torch

from pelton.core.errors import CapacityError
from pelton.models.checkpoint import Checkpoint
from pelton.models.language_model import LanguageModel
from pelton.models.loader import match_tensors
from pelton.models.registry import Architecture, ArchitectureConfig
from pelton.quantization.fp8 import computes_in_fp8


def build_model(
    architecture: Architecture,
    config: ArchitectureConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    name: str,
    checkpoint: Checkpoint | None = None,
) -> LanguageModel:
    """On `device`, unfilled; `dtype` is that of the activations. Raises `CheckpointError` where
    `checkpoint` holds other tensors, `CapacityError` with both figures where memory is short."""
    with torch.device("meta"), default_dtype(dtype):
        outline = architecture.build(config)
    if checkpoint is not None:
        match_tensors(outline, architecture.weights(config), checkpoint)
    needed, available = weight_bytes(outline, device, dtype), _available_bytes(device)
    if needed > available:
        narrower = "--dtype bfloat16, " if dtype is torch.float32 else ""
        raise CapacityError(
            f"The weights of {name} take {needed:,} bytes in memory and {available:,} are free on"
            f" {device.type}; take {narrower}a smaller model, or fewer --layers of"
            " --random-weights.",
            param="model",
        )
    with torch.device(device), default_dtype(dtype):
        return architecture.build(config)


def weight_bytes(outline: LanguageModel, device: torch.device, dtype: torch.dtype) -> int:
    """What parameters and tables take on `device`, FP8 dequantised to `dtype` where it is not
    computed in."""
    is_native = computes_in_fp8(device)
    total = 0
    for tensor in chain(outline.parameters(), outline.buffers()):
        is_fp8 = tensor.dtype is torch.float8_e4m3fn
        total += tensor.numel() * (dtype if is_fp8 and not is_native else tensor.dtype).itemsize
    return total


def _available_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
