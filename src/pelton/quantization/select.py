# SPDX-License-Identifier: Apache-2.0
"""Which weight format a configuration means on a device."""

import torch

from pelton.core.config import Quantization
from pelton.core.errors import ConfigError
from pelton.quantization.format import WeightFormat
from pelton.quantization.plain import PlainWeight


def select_format(
    quantization: Quantization, dtype: torch.dtype, device: torch.device
) -> WeightFormat:
    """Raises `ConfigError` for a format that the device does not compute on."""
    if quantization is Quantization.NONE:
        return PlainWeight
    raise ConfigError(f"--quantization {quantization} is not available.", param="quantization")
