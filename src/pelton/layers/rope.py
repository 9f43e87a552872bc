# SPDX-License-Identifier: Apache-2.0
"""The table of cosines and sines that rotary position embedding looks up."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK = 2**16
"""Positions computed at a time, so that float64 angles stay small beside the table."""


def make_rope_table(
    max_positions: int,
    head_dim: int,
    theta: float,
    factors: Sequence[float] = (),
    device: torch.device | str = "cpu",
    magnitude: float = 1.0,
) -> Float[Tensor, "max K"]:
    """Row p: cosines of p * f_i for the head_dim / 2 frequencies f_i, then their sines, float32.

    f_i = theta ** (-2 i / head_dim) / factors[i]. Both are multiplied by `magnitude`, by which
    YaRN keeps attention sharp. Angles are taken in float64 and rounded once.
    """
    table = torch.empty((max_positions, head_dim), dtype=torch.float32, device=device)
    if table.is_meta:
        return table  # no value is asked for, and arithmetic there would load a hundred megabytes
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = theta**-exponents
    if factors:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64, device=device)
    for start in range(0, max_positions, _CHUNK):
        rows = table[start : start + _CHUNK]
        positions = torch.arange(start, start + rows.shape[0], dtype=torch.float64, device=device)
        angles = positions[:, None] * frequencies
        rows.copy_(torch.cat((angles.cos(), angles.sin()), dim=1) * magnitude)
    return table
