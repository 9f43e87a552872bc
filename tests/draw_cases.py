# SPDX-License-Identifier: Apache-2.0
"""Logits and filters that touch every branch of drawing a token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pelton.kernels.draw_tokens.reference import RandomRows
from pelton.kernels.highest_logit import highest_logit_reference


@dataclass(frozen=True)
class DrawCase:
    num_rows: int
    vocab_size: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    spread: float = 3.0
    """Standard deviation of the logits."""
    grid: float = 0.0
    """Logits are multiples of it, so that there are ties; 0: no grid."""

    def __str__(self) -> str:
        filters = f"k{self.top_k}-p{self.top_p:g}-m{self.min_p:g}"
        kind = f"T{self.temperature:g}-s{self.spread:g}-g{self.grid:g}"
        return f"R{self.num_rows}-V{self.vocab_size}-{filters}-{kind}"


DRAW_CASES = [
    DrawCase(0, 40, top_p=0.9),
    DrawCase(1, 1, top_k=3, top_p=0.5),
    DrawCase(5, 50),
    DrawCase(5, 50, top_k=5),
    DrawCase(3, 50, top_k=10**6, top_p=0.999),
    DrawCase(4, 300, top_p=0.9, grid=0.5),
    DrawCase(4, 300, top_k=20, top_p=0.5, grid=1.0),
    DrawCase(4, 300, top_k=2, top_p=1e-9, grid=4.0),
    DrawCase(4, 300, min_p=0.2, grid=0.5),
    DrawCase(4, 300, min_p=1.0, top_p=0.7, grid=2.0),
    DrawCase(3, 2048, temperature=0.7, top_k=50, top_p=0.8, min_p=0.01),
    DrawCase(3, 5000, top_p=0.9),
    DrawCase(3, 5000, top_p=0.9, spread=0.01),
    DrawCase(3, 5000, top_p=0.9, spread=0.0),
    DrawCase(2, 5000, top_k=700, spread=30.0),
    DrawCase(2, 4099, temperature=100.0, top_p=0.5),
    DrawCase(2, 4099, temperature=1e-38, top_k=3, top_p=0.5),
]
LARGE_DRAW_CASES = [
    DrawCase(1, 128256, top_p=0.9),
    DrawCase(64, 128256, top_p=0.9, spread=1.3),
    DrawCase(256, 128256, top_k=50, top_p=0.9),
    DrawCase(256, 128256, top_p=0.95, min_p=0.001, spread=1.3, grid=2**-5),
    DrawCase(130, 201088, temperature=0.6, top_k=5000, top_p=0.99, spread=1.3),
]


def make_draw_inputs(
    case: DrawCase, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, RandomRows]:
    """Logits in rows of a wider buffer, of one row more than are drawn, in another order."""
    shape = case.num_rows + 1, case.vocab_size + 16
    logits = torch.randn(shape, generator=generator) * case.spread
    if case.grid:
        logits = (logits / case.grid).round() * case.grid
    logits[:, 1::17] = float("-inf")
    logits = logits.to(dtype)[:, : case.vocab_size]
    highest_ids, _ = highest_logit_reference(logits)

    def column(value: float, column_dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((case.num_rows,), value, dtype=column_dtype, device=device)

    uniforms = torch.randint(0, 2**24, (case.num_rows,), generator=generator) / 2**24
    rows = RandomRows(
        rows=torch.arange(case.num_rows, 0, -1).to(device),
        temperature=column(case.temperature),
        uniforms=uniforms.to(device),
        top_k=column(case.top_k, torch.int32),
        top_p=column(case.top_p),
        min_p=column(case.min_p),
        has_top_k=case.top_k > 0,
        has_top_p=case.top_p < 1,
    )
    return wide_rows(logits, device), highest_ids.to(device), rows


def wide_rows(logits: Tensor, device: torch.device) -> Tensor:
    """On the device, with a stride that differs from the width."""
    wide = torch.full((logits.shape[0], logits.shape[1] + 16), float("nan"), dtype=logits.dtype)
    wide[:, : logits.shape[1]] = logits
    return wide.to(device)[:, : logits.shape[1]]
