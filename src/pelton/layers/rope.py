# SPDX-License-Identifier: Apache-2.0
"""The table of cosines and sines that rotary position embedding looks up."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


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
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = theta**-exponents
    if factors:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float64, device=device)
    positions = torch.arange(max_positions, dtype=torch.float64, device=device)
    angles = positions[:, None] * frequencies
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * magnitude).float()
