# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are FP8 in blocks of 128 x 128; otherwise as `layers.moe.experts`.

A card with FP8 units multiplies them as they are. Elsewhere they are dequantised once, after
loading, to the activations' number format.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pelton.kernels.fp8.quantize import quantize_fp8
from pelton.kernels.moe.expert_product.op import down_product, gate_up_product
from pelton.kernels.moe.fp8_product import (
    dequantize_experts,
    fp8_down_product,
    fp8_gate_up_product,
)
from pelton.kernels.moe.gate import Gate
from pelton.kernels.moe.routing import Routing
from pelton.kernels.moe.sort_by_expert import sort_by_expert
from pelton.kernels.moe.weighted_sum import WeightedRows
from pelton.quantization.fp8 import FP8Rows, Rows, computes_in_fp8, plain_rows
from pelton.quantization.fp8_scheme import BLOCK_SIZE


class FP8Experts(nn.Module):
    gate_up: nn.Parameter
    """e4m3 [E, 2F, D], gate and up rows interleaved."""
    gate_up_scale: nn.Parameter
    """float32 [E, 2 * blocks of F, blocks of D], the blocks of gate and up interleaved."""
    down: nn.Parameter
    """e4m3 [E, D, F]"""
    down_scale: nn.Parameter
    """float32 [E, blocks of D, blocks of F]"""

    interleaved_parts: Mapping[str, int] = MappingProxyType({"gate_up": 2, "gate_up_scale": 2})

    def __init__(self, num_experts: int, hidden_size: int, ffn_size: int, gate: Gate) -> None:
        super().__init__()
        self._num_experts = num_experts
        self._gate = gate
        self._dtype = torch.get_default_dtype()
        self._is_native = True
        hidden_blocks, ffn_blocks = -(-hidden_size // BLOCK_SIZE), -(-ffn_size // BLOCK_SIZE)
        fp8 = torch.float8_e4m3fn
        self.gate_up = _parameter(fp8, num_experts, 2 * ffn_size, hidden_size)
        self.gate_up_scale = _parameter(torch.float32, num_experts, 2 * ffn_blocks, hidden_blocks)
        self.down = _parameter(fp8, num_experts, hidden_size, ffn_size)
        self.down_scale = _parameter(torch.float32, num_experts, hidden_blocks, ffn_blocks)

    def absorb(self) -> None:
        """Call once, after loading: dequantises where the device does not compute in FP8."""
        if computes_in_fp8(self.gate_up.device):
            return
        self._is_native = False
        for name, is_interleaved in (("gate_up", True), ("down", False)):
            weight, scale = getattr(self, name), getattr(self, f"{name}_scale")
            values = torch.empty(weight.shape, dtype=self._dtype, device=weight.device)
            for expert in range(self._num_experts):
                one = slice(expert, expert + 1)
                values[one] = dequantize_experts(weight[one], scale[one], is_interleaved)
            delattr(self, f"{name}_scale")
            setattr(self, name, nn.Parameter(values, requires_grad=False))

    def forward(self, x: Rows, routing: Routing) -> WeightedRows:
        expert_ids, weights = routing.choose()
        routed = sort_by_expert(expert_ids, self._num_experts)
        if not self._is_native:
            x = plain_rows(x)
            hidden = gate_up_product(x, routed, self.gate_up, None, self._gate)
            return WeightedRows(down_product(hidden, routed, self.down, None), weights)
        if isinstance(x, Tensor):
            x = FP8Rows(*quantize_fp8(x, BLOCK_SIZE), x.dtype, x)
        hidden = fp8_gate_up_product(
            x.values, x.scales, routed, self.gate_up, self.gate_up_scale, self._gate, x.dtype
        )
        quantized, scales = quantize_fp8(hidden, BLOCK_SIZE)
        rows = fp8_down_product(quantized, scales, routed, self.down, self.down_scale, x.dtype)
        return WeightedRows(rows, weights)

    __call__ = forward


def _parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
