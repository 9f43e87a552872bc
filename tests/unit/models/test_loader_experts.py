# SPDX-License-Identifier: Apache-2.0
"""Experts' tensors: one a checkpoint tensor each or stacked, transposed or packed."""

import pytest
import torch
from tiny_models import StateCheckpoint
from torch import Tensor, nn

from pelton.core.errors import CheckpointError
from pelton.kernels.moe.gate import SWIGLU
from pelton.layers.linear import Linear
from pelton.layers.moe.experts import Experts
from pelton.models.loader import load_weights
from pelton.models.weight_table import Weight

E, D, F = 3, 8, 6


class Tiny(nn.Module):
    """Two layers, of which only the second has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Module(), nn.Module()))
        for layer in self.layers:
            layer.norm = nn.Parameter(torch.empty(D))
        self.layers[1].experts = Experts(E, D, F, SWIGLU)


NORM = Weight("layers.{layer}.norm", "layers.{layer}.norm")
EXPERTS, LAST = "layers.{layer}.experts.", (1,)
NORMS = {f"layers.{layer}.norm": torch.rand(D) for layer in range(2)}


def load(table: list[Weight], state: dict[str, Tensor]) -> Experts:
    model = Tiny()
    load_weights(model, [NORM, *table], StateCheckpoint({}, {**NORMS, **state}))
    return model.layers[1].experts


def test_one_tensor_for_each_expert() -> None:
    gate, up, down = torch.rand(E, F, D), torch.rand(E, F, D), torch.rand(E, D, F)
    state = {}
    for expert in range(E):
        prefix = f"layers.1.experts.{expert}."
        state[prefix + "gate.weight"] = gate[expert]
        state[prefix + "up.weight"] = up[expert]
        state[prefix + "down.weight"] = down[expert]
    source = EXPERTS + "{expert}."

    experts = load(
        [
            Weight(source + "gate.weight", EXPERTS + "gate_up", 0, layers=LAST),
            Weight(source + "up.weight", EXPERTS + "gate_up", 1, layers=LAST),
            Weight(source + "down.weight", EXPERTS + "down", layers=LAST),
        ],
        state,
    )

    assert torch.equal(experts.gate_up[:, 0::2], gate)
    assert torch.equal(experts.gate_up[:, 1::2], up)
    assert torch.equal(experts.down, down)


def test_stacked_and_transposed() -> None:
    gate_up, down = torch.rand(E, D, 2 * F), torch.rand(E, F, D)

    experts = load(
        [
            Weight(EXPERTS + "gate_up", EXPERTS + "gate_up", is_transposed=True, layers=LAST),
            Weight(EXPERTS + "down", EXPERTS + "down", is_transposed=True, layers=LAST),
        ],
        {"layers.1.experts.gate_up": gate_up, "layers.1.experts.down": down},
    )

    assert torch.equal(experts.gate_up, gate_up.transpose(1, 2))
    assert torch.equal(experts.down, down.transpose(1, 2))


def test_gate_and_up_stacked_apart() -> None:
    gate, up, down = torch.rand(E, F, D), torch.rand(E, F, D), torch.rand(E, D, F)

    experts = load(
        [
            Weight(EXPERTS + "gate", EXPERTS + "gate_up", 0, layers=LAST),
            Weight(EXPERTS + "up", EXPERTS + "gate_up", 1, layers=LAST),
            Weight(EXPERTS + "down", EXPERTS + "down", layers=LAST),
        ],
        {f"layers.1.experts.{k}": v for k, v in (("gate", gate), ("up", up), ("down", down))},
    )

    assert torch.equal(experts.gate_up, torch.stack((gate, up), dim=2).flatten(1, 2))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.uint8, torch.bfloat16),
        (torch.float32, torch.uint8),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_packed_bits_are_never_taken_for_numbers(stored, wanted) -> None:
    model = nn.Module()
    model.head = Linear(4, (4,))
    model.head.weight = nn.Parameter(torch.empty(4, 4, dtype=wanted), requires_grad=False)
    checkpoint = StateCheckpoint({}, {"w": torch.zeros(4, 4).to(stored)})

    with pytest.raises(CheckpointError, match="different weight formats"):
        load_weights(model, [Weight("w", "head.weight")], checkpoint)
