# SPDX-License-Identifier: Apache-2.0
"""Products with MXFP4 experts on a CPU: an expert is dequantised when it is used, then dropped."""

from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.moe.expert_product.cpu import product_by_expert
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.reference import dequantize_mxfp4
from pelton.kernels.moe.sort_by_expert import RoutedRows


def mxfp4_product_cpu(
    x: Float[Tensor, "n D"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E F D/32 16"],
    scales: UInt8[Tensor, "E F D/32"],
    bias: Float[Tensor, "E F"] | None,
    gate: Gate | None = None,
) -> Float[Tensor, "N f"]:
    def weight_of(expert: int) -> Tensor:
        return dequantize_mxfp4(blocks[expert], scales[expert], x.dtype)

    return product_by_expert(x, routed, weight_of, blocks.shape[1], bias, gate)
