# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: what their bits mean, and the experts' products with them.

32 neighbours of a weight row share a scale of 8 bits, 2^(s - 127) (E8M0; 255 is NaN). An element
has 4 bits, E2M1: a sign, then the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Two lie in a byte, the
first in the low half (Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0,
sections 5.3.3, 5.4.1 and 6.3). The value is element times scale, exactly.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.moe.expert_product.reference import expert_product_reference
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.sort_by_expert import RoutedRows

BLOCK = 32
"""Elements that share a scale."""
PACKED = BLOCK // 2
"""Bytes of them."""
BITS = 4 + 8 / BLOCK
"""An element's own and its share of the scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_POWERS = (*(2.0 ** (scale - 127) for scale in range(255)), float("nan"))


def dequantize_mxfp4(
    blocks: UInt8[Tensor, "*axes D/32 16"],
    scales: UInt8[Tensor, "*axes D/32"],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*axes D"]:
    """Exact in float32, and in bfloat16 but at the ends of its range."""
    signed = _MAGNITUDES + tuple(-magnitude for magnitude in _MAGNITUDES)
    # Both elements of every byte at once.
    pairs = torch.tensor(
        [(signed[byte & 15], signed[byte >> 4]) for byte in range(256)],
        dtype=dtype, device=blocks.device,
    )  # fmt: skip
    elements = pairs[blocks.int()].flatten(-2)  # [*axes, D/32, 32]
    powers = torch.tensor(_POWERS, dtype=dtype, device=scales.device)[scales.int()]
    return (elements * powers[..., None]).flatten(-2)


def mxfp4_product_reference(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E F D/32 16"],
    scales: UInt8[Tensor, "E F D/32"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    return expert_product_reference(x, routed, dequantize_mxfp4(blocks, scales), bias, gate)
