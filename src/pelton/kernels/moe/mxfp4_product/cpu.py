# SPDX-License-Identifier: Apache-2.0
"""Products with MXFP4 experts on a CPU: an expert is dequantised when it is used, then dropped."""

from jaxtyping import Float, UInt8
from torch import Tensor

from pelton.kernels.moe.expert_product.cpu import down_by_expert, gate_up_by_expert
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.mxfp4_product.reference import dequantize_mxfp4
from pelton.kernels.moe.sort_by_expert import RoutedRows


def mxfp4_gate_up_product_cpu(
    x: Float[Tensor, "T D"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E 2F D/32 16"],
    scales: UInt8[Tensor, "E 2F D/32"],
    bias: Float[Tensor, "E 2F"] | None,
    gate: Gate,
) -> Float[Tensor, "N F"]:
    def weight_of(expert: int) -> Tensor:
        return dequantize_mxfp4(blocks[expert], scales[expert], x.dtype)

    return gate_up_by_expert(x, routed, weight_of, bias, gate, blocks.shape[1] // 2)


def mxfp4_down_product_cpu(
    hidden: Float[Tensor, "N F"],
    routed: RoutedRows,
    blocks: UInt8[Tensor, "E D F/32 16"],
    scales: UInt8[Tensor, "E D F/32"],
    bias: Float[Tensor, "E D"] | None,
) -> Float[Tensor, "N D"]:
    def weight_of(expert: int) -> Tensor:
        return dequantize_mxfp4(blocks[expert], scales[expert], hidden.dtype)

    return down_by_expert(hidden, routed, weight_of, bias, blocks.shape[1])
