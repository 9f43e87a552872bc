# SPDX-License-Identifier: Apache-2.0
"""Which weight format a configuration means on a device."""

from functools import partial

import torch

from pelton.core.config import Quantization
from pelton.core.errors import ConfigError
from pelton.quantization.format import WeightFormat
from pelton.quantization.int4 import Int4Weight
from pelton.quantization.int8 import Int8Weight
from pelton.quantization.onednn import OneDNNWeight, has_bfloat16_products
from pelton.quantization.plain import PlainWeight


def is_compiled_by_size(quantization: Quantization, dtype: torch.dtype) -> bool:
    """Whether products on a CPU are compiled, and kept, for every number of rows they meet."""
    return quantization is not Quantization.NONE or dtype is torch.bfloat16


def select_head_format(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """Of the product that gives the logits. At 4 bits it would cost more accuracy than all the
    layers together, so it keeps 8."""
    is_int4 = quantization is Quantization.INT4
    return select_float32_format(Quantization.INT8 if is_int4 else quantization, dtype, device)


def select_float32_format(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """Of products whose results are read in float32. A GPU gives them so: logits around 26 are
    0.125 apart in bfloat16, and one choice in fifty would fall to a tie."""
    if device.type == "cuda" and quantization is Quantization.NONE:
        return partial(PlainWeight, dtype=torch.float32)
    return select_format(quantization, dtype, device)


def select_format(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """Raises `ConfigError` for a format that the device does not compute on."""
    if device.type != "cpu" and quantization is not Quantization.NONE:
        raise ConfigError(
            f"--quantization {quantization} computes on a CPU only; use none on {device.type}.",
            param="quantization",
        )
    is_bfloat16 = device.type == "cpu" and dtype is torch.bfloat16
    unquantized: WeightFormat = PlainWeight
    if is_bfloat16 and has_bfloat16_products():
        unquantized = OneDNNWeight
    if quantization is Quantization.INT8:
        return Int8Weight
    if quantization is Quantization.INT4:
        return partial(Int4Weight, for_many=unquantized)
    return unquantized
