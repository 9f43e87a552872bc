# SPDX-License-Identifier: Apache-2.0
"""Llama checkpoints in FP8, in each published layout, against transformers on their values."""

import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import TinyModel, make_request, make_tied_llama3, run, tokens_of
from torch import Tensor

from pelton.core.errors import CheckpointError
from pelton.models import llama
from pelton.models.hf_checkpoint import HFCheckpoint
from pelton.models.llama_config import Config
from pelton.models.loader import load_weights
from pelton.quantization.plain import PlainWeight
from tolerance import LOGIT_ABS

BLOCK = 128
LAYOUTS = {
    "compressed-tensors-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
            }
        },
    },
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fbgemm": {
        "quant_method": "fbgemm_fp8",
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": ["model.layers.0", "self_attn", "lm_head"],
    },
}
SKIPPED = {
    "compressed-tensors-channel": r"layers\.1\.mlp",
    "fp8-tensor": "^$",
    "fbgemm": r"layers\.0\.|self_attn",
}


def quantize(weight: Tensor, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 values, scales in the layout's shape, and the values that both stand for."""
    if layout == "fp8-tensor":
        scale = weight.abs().max() / 448
    else:
        scale = weight.abs().amax(1, keepdim=True) / 448
    quantized = (weight / scale).to(torch.float8_e4m3fn)
    return quantized, scale, quantized.float() * scale


@pytest.fixture(scope="module", params=list(LAYOUTS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = make_tied_llama3().eval()
    state: dict[str, Tensor] = {}
    for name, weight in reference.state_dict().items():
        if name == "lm_head.weight":
            continue
        state[name] = weight.clone()
        if "_proj." in name and not re.search(SKIPPED[request.param], name):
            quantized, scale, values = quantize(weight, request.param)
            state[name], state[name + "_scale"] = quantized, scale
            weight.copy_(values)
    folder = tmp_path_factory.mktemp(request.param)
    reference.config.quantization_config = LAYOUTS[request.param]
    reference.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors")
    return load(folder, reference)


def load(folder: Path, reference) -> TinyModel:
    checkpoint = HFCheckpoint(folder)
    config = Config.from_hf(checkpoint.config)
    model = llama.Model(config)
    load_weights(model, llama.weights(config), checkpoint)
    model.pack(PlainWeight)
    return TinyModel(reference, model, config.geometry("tiny"))


def test_logprobs_and_tokens_equal_transformers(tiny: TinyModel) -> None:
    source = random.Random(3)
    prompts = [[source.randrange(211) for _ in range(length)] for length in (1, 17, 90)]
    requests = [make_request(str(i), p, prompt_logprobs=0) for i, p in enumerate(prompts)]

    outputs = run(tiny.make_engine(max_num_batched_tokens=40), requests)

    for index, prompt in enumerate(prompts):
        output = outputs[str(index), 0]
        ids = torch.tensor([prompt + output.token_ids])
        with torch.no_grad():
            wanted = tiny.reference(ids).logits[0].log_softmax(-1)
        assert wanted[len(prompt) - 1 : -1].argmax(-1).tolist() == output.token_ids
        got = [entry.logprob for entry in output.prompt_logprobs[1:]]
        expected = wanted[: len(prompt) - 1].gather(1, ids[0, 1 : len(prompt), None])[:, 0]
        torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=LOGIT_ABS)
    assert set(tokens_of(outputs)) == {("0", 0), ("1", 0), ("2", 0)}


def test_a_config_that_does_not_say_what_the_tensors_are_is_refused(tmp_path) -> None:
    reference = make_tied_llama3()
    state = {name: w.clone() for name, w in reference.state_dict().items() if name != "lm_head"}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)
    reference.config.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=f"{name} holds .*e4m3fn"):
        load(tmp_path, reference)
