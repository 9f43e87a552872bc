# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pelton.models.llama_config import Config
from pelton.models.random_weights import GEOMETRIES, make_random_model

TINY = {
    **GEOMETRIES["llama-3.1-8b"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("name", "millions"), [("llama-3.1-8b", 8030), ("smollm2-135m", 134)], ids=str
)
def test_geometries_have_the_parameters_of_their_namesakes(name: str, millions: int) -> None:
    geometry = Config.from_hf(GEOMETRIES[name]).geometry(name)

    assert geometry.num_parameters // 10**6 == millions


def test_weights_are_random_normal_and_norms_one() -> None:
    model, geometry = make_random_model("tiny", TINY, torch.device("cpu"), torch.bfloat16)

    parameters = dict(model.named_parameters())
    matrix = parameters["blocks.1.mlp.down.weight"].float()
    assert matrix.std().item() == pytest.approx(0.02, rel=0.02)
    assert abs(matrix.mean().item()) < 1e-3
    assert (parameters["blocks.0.mlp_norm.weight"] == 1).all()
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    assert geometry.name == "tiny (random weights)"


def test_the_seed_decides_the_weights() -> None:
    def first_weight(seed: int) -> torch.Tensor:
        model, _ = make_random_model("tiny", TINY, torch.device("cpu"), torch.float32, seed)
        return model.state_dict()["blocks.0.mlp.down.weight"]

    assert torch.equal(first_weight(1), first_weight(1))
    assert not torch.equal(first_weight(1), first_weight(2))
