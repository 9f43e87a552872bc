# SPDX-License-Identifier: Apache-2.0
"""Shapes for the experts' products, and routings that leave experts empty or crowd one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertCase:
    num_tokens: int
    num_experts: int
    top_k: int
    hidden_size: int
    ffn_size: int
    routing: str = "random"
    """"random"; "one": all tokens choose the same experts; "last": never the first half."""
    has_bias: bool = True

    def __str__(self) -> str:
        return (
            f"T{self.num_tokens}-E{self.num_experts}-k{self.top_k}-D{self.hidden_size}"
            f"-F{self.ffn_size}-{self.routing}" + ("" if self.has_bias else "-nobias")
        )


def make_expert_ids(case: ExpertCase, generator: torch.Generator) -> Tensor:
    """int32 [T, k] on the generator's device, each token's experts different."""
    scores = torch.rand(
        case.num_tokens, case.num_experts, generator=generator, device=generator.device
    )
    if case.routing == "one":
        scores = scores[:1].expand_as(scores)
    if case.routing == "last":
        scores[:, : case.num_experts // 2] = -1
    return scores.topk(case.top_k, dim=1).indices.to(torch.int32).contiguous()


@dataclass
class ExpertInputs:
    x: Tensor
    expert_ids: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def make_expert_inputs(
    case: ExpertCase, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> ExpertInputs:
    """Weights of experts that no token chose are NaN. Large ones are quicker drawn by a generator
    of the device."""

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=dtype)
        return drawn.mul_(scale).to(device)

    expert_ids = make_expert_ids(case, generator)
    num_experts, hidden, ffn = case.num_experts, case.hidden_size, case.ffn_size
    gate_up = randn(num_experts, 2 * ffn, hidden, scale=2 * hidden**-0.5)
    down = randn(num_experts, hidden, ffn, scale=ffn**-0.5)
    biases = randn(num_experts, 2 * ffn), randn(num_experts, hidden)
    idle = sorted(set(range(num_experts)) - set(expert_ids.flatten().tolist()))
    for tensor in (gate_up, down, *biases):
        for expert in idle:
            tensor[expert].fill_(float("nan"))
    return ExpertInputs(
        x=randn(case.num_tokens, hidden + 16)[:, :hidden],
        expert_ids=expert_ids.to(device),
        gate_up=gate_up,
        gate_up_bias=biases[0] if case.has_bias else None,
        down=down,
        down_bias=biases[1] if case.has_bias else None,
    )


EXPERT_CASES = [
    ExpertCase(0, 4, 2, 32, 32),
    ExpertCase(1, 4, 1, 32, 32),
    ExpertCase(1, 8, 4, 96, 64),
    ExpertCase(3, 5, 2, 61, 37),
    ExpertCase(17, 4, 2, 64, 48, has_bias=False),
    ExpertCase(33, 3, 3, 40, 24),
    ExpertCase(37, 8, 2, 72, 40, "one"),
    ExpertCase(40, 16, 3, 48, 56, "last"),
]
LARGE_EXPERT_CASES = [
    ExpertCase(1, 128, 4, 2880, 2880),
    ExpertCase(67, 32, 4, 2880, 2880),
    ExpertCase(1021, 32, 4, 2880, 1440),
    ExpertCase(2048, 16, 2, 1024, 512, "one"),
    ExpertCase(300, 256, 8, 512, 256, has_bias=False),
]


MXFP4_CASES = [
    ExpertCase(0, 4, 2, 64, 32),
    ExpertCase(1, 4, 2, 64, 32),
    ExpertCase(3, 5, 2, 96, 160),
    ExpertCase(33, 3, 3, 320, 96, has_bias=False),
    ExpertCase(37, 8, 2, 64, 96, "one"),
    ExpertCase(40, 16, 3, 192, 64, "last"),
]

MXFP4_TOKENS = [
    ExpertCase(1, 5, 3, 64, 32),
    ExpertCase(1, 5, 3, 192, 160, has_bias=False),
    ExpertCase(1, 5, 3, 320, 352),
    ExpertCase(1, 16, 3, 1152, 704),
    ExpertCase(1, 4, 3, 2048, 1440),
]
"""Of one token each: one round to sixteen, full and not."""

AWKWARD_LOGITS = [
    [0.0, -0.0, 0.0, -0.0],
    [1.0, math.nan, 1.0, -1.0],
    [-math.inf, 0.5, -math.inf, 0.25],
    [-3.0, -2.0, -math.inf, -2.0],
    [math.nan, math.nan, -1e-30, 1e-30],
    [1e30, -1e30, 1e-20, -1e-20],
    [-200.0, -201.0, -150.5, -151.0],
]
"""Of a router over four experts: ties, zeros of both signs, what is not finite, and exponentials
that are 0 but for their largest."""


@dataclass
class MXFP4Weights:
    """In the published layout; scales around those of weights of about 2 / sqrt(D)."""

    gate_up_blocks: Tensor
    gate_up_scales: Tensor
    down_blocks: Tensor
    down_scales: Tensor


def make_mxfp4_weights(
    case: ExpertCase, device: torch.device, generator: torch.Generator
) -> MXFP4Weights:
    def make(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shape = case.num_experts, rows, columns // 32
        blocks = torch.empty(*shape, 16, dtype=torch.uint8, device=generator.device)
        low = 127 - columns.bit_length() // 2 - 2
        scales = torch.empty(shape, dtype=torch.uint8, device=generator.device)
        blocks.random_(0, 256, generator=generator)
        scales.random_(low, low + 3, generator=generator)
        return blocks.to(device), scales.to(device)

    return MXFP4Weights(
        *make(2 * case.ffn_size, case.hidden_size), *make(case.hidden_size, case.ffn_size)
    )


_ELEMENTS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_POWERS = [2.0 ** (scale - 127) for scale in range(256)]


def dequantize_by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 to float64, one half byte after the other, apart from the code under test."""
    low, high = (blocks & 0x0F).long(), (blocks >> 4).long()
    signed = _ELEMENTS + [-x for x in _ELEMENTS]
    table = torch.tensor(signed, dtype=torch.float64, device=blocks.device)
    values = torch.empty(*blocks.shape[:-1], 32, dtype=torch.float64, device=blocks.device)
    values[..., 0::2] = table[low]
    values[..., 1::2] = table[high]
    powers = torch.tensor(_POWERS, dtype=torch.float64, device=scales.device)[scales.int()]
    return (values * powers[..., None]).flatten(-2)


class MXFP4ByHand:
    """[E, F, D] of which only the expert that is asked for is ever in memory as numbers."""

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        self._blocks, self._scales = blocks, scales
        self.shape = (*blocks.shape[:2], 32 * blocks.shape[2])

    def __getitem__(self, expert: int) -> Tensor:
        return dequantize_by_hand(self._blocks[expert], self._scales[expert]).float()
