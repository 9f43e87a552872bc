# SPDX-License-Identifier: Apache-2.0
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The gate of an expert's feed-forward layer, as a part of the product that feeds it.

With gate g and up-projection u, interleaved as (g0, u0, g1, u1, ...):

    out = g sigmoid(alpha g) (u + offset), where g <= limit and |u| <= limit

Plain SwiGLU has alpha 1, no limit and offset 0 (Shazeer, "GLU Variants Improve Transformer",
2020); GPT-OSS has alpha 1.702, limit 7 and offset 1. Interleaving lets one tile of a product hold
both halves of what it gates.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pelton.kernels.triton_runtime import tl, triton


@dataclass(frozen=True, slots=True)
class Gate:
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0


SWIGLU = Gate()


def apply_gate(gate_up: Float[Tensor, "N 2F"], gate: Gate) -> Float[Tensor, "N F"]:
    """In the number format of `gate_up`, whose columns are interleaved."""
    g, u = gate_up[:, 0::2], gate_up[:, 1::2]
    if gate.limit != math.inf:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return g * torch.sigmoid(gate.alpha * g) * (u + gate.offset)


@triton.jit
def gate_tile(acc, alpha, limit, offset, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """`acc` is float32 [BLOCK_T, BLOCK_F] of interleaved columns; gives [BLOCK_T, BLOCK_F / 2]."""
    g, u = tl.split(tl.reshape(acc, [BLOCK_T, BLOCK_F // 2, 2]))
    # Written so that a NaN stays one.
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    return g * tl.sigmoid(alpha * g) * (u + offset)
