# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints in each published layout, byte by byte, and transformers on their values.

The writer is a few lines of its own, so that no code of Pelton's decides what a layout is.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from published import index_of, published
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

VOCAB, ORIGIN, CONTEXT = 211, 64, 512
NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Layout:
    folder: Path
    reference: PreTrainedModel
    """On the very values that the checkpoint holds."""


def write_safetensors(file: Path, tensors: dict[str, Tensor]) -> None:
    header, data = {}, bytearray()
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def write_shards(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """In two files, a layer's tensors on both sides."""
    names, weight_map = list(tensors), {}
    for number in (0, 1):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[number::2]}
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def small(name: str, **sizes: Any) -> dict[str, Any]:
    """The published config with other numbers in its fields."""
    config = published(name)
    ends = {"vocab_size": VOCAB} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    rope = {**config["rope_scaling"], "factor": 8.0, "original_max_position_embeddings": ORIGIN}
    return {
        **config, **ends, "max_position_embeddings": CONTEXT, "initializer_range": 0.1,
        "rope_theta": 10000.0, "rope_scaling": rope, **sizes,
    }  # fmt: skip


def make_reference(
    model_class: type[PreTrainedModel], config_class: type, config: dict[str, Any], folder: Path
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A random model whose weights are bfloat16 numbers, and its tensors under their names."""
    plain = {key: value for key, value in config.items()
             if key not in ("quantization_config", "auto_map", "torch_dtype")}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**plain, attn_implementation="eager")).eval()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(tensor.data, std=0.3)
            if "rotary" not in name:
                tensor.data = tensor.data.bfloat16().float()
    model.save_pretrained(folder / "saved")
    saved = load_file(folder / "saved" / "model.safetensors")
    return model, {name: tensor.bfloat16() for name, tensor in saved.items()}


def set_weight(model: PreTrainedModel, name: str, values: Tensor) -> None:
    """transformers stacks the experts that a DeepSeek checkpoint has one by one."""
    if ".experts." not in name:
        model.get_parameter(name).data.copy_(values)
        return
    prefix, _, rest = name.partition(".experts.")
    expert, kind, _ = rest.split(".")
    experts = model.get_submodule(prefix + ".experts")
    if kind == "down_proj":
        experts.down_proj.data[int(expert)] = values
        return
    size = values.shape[0]
    start = size if kind == "up_proj" else 0
    experts.gate_up_proj.data[int(expert), start : start + size] = values


def quantize(
    weight: Tensor, block: tuple[int, int], scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """e4m3 numbers, a scale for every `block`, and the values that both stand for."""
    rows, columns = weight.shape
    shape = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.empty(shape, dtype=scale_dtype)
    quantized, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), weight.float()
    for row in range(shape[0]):
        for column in range(shape[1]):
            part = (slice(row * block[0], (row + 1) * block[0]),
                    slice(column * block[1], (column + 1) * block[1]))  # fmt: skip
            highest = weight[part].float().abs().max() / 448
            scales[row, column] = highest.to(scale_dtype)
            scale = scales[row, column].float()
            quantized[part] = (weight[part].float() / scale).to(torch.float8_e4m3fn)
            values[part] = quantized[part].float() * scale
    return quantized, scales, values


def write_llama(folder: Path, name: str) -> Layout:
    config = small(
        name, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2,
    )  # fmt: skip
    if "fbgemm" in json.dumps(config):
        skipped = config["quantization_config"]["modules_to_not_convert"]
        skipped[:] = [own for own in skipped if not own.startswith("model.layers.125")]
        skipped += [f"model.layers.2.mlp.{own}_proj" for own in ("down", "gate", "up")]
    model, state = make_reference(LlamaForCausalLM, LlamaConfig, config, folder)
    for own, shape in index_of(config).items():
        if own.endswith(".weight_scale"):
            weight = own.removesuffix("_scale")
            rows, columns = state[weight].shape
            block = (rows, columns) if shape == (1,) else (1, columns)
            scale_dtype = torch.bfloat16 if "dynamic" in name else torch.float32
            state[weight], scales, values = quantize(state[weight], block, scale_dtype)
            state[own] = scales.reshape(shape)
            set_weight(model, weight, values)
        elif own.endswith(".input_scale"):
            state[own] = torch.tensor([0.01])
    if "input_scale" in str(list(state)):  # some of these have scales of an FP8 cache besides
        for layer in range(3):
            for kind in "kv":
                state[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(0.5)
    write_shards(folder, state, config)
    return Layout(folder, model)


def write_deepseek(
    folder: Path, name: str = "DeepSeek-R1", scale_dtype: torch.dtype = torch.float32
) -> Layout:
    config = small(
        name, hidden_size=192, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=3, first_k_dense_replace=1, num_attention_heads=4, num_key_value_heads=4,
        n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, q_lora_rank=128,
        kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
    )  # fmt: skip
    model, state = make_reference(DeepseekV3ForCausalLM, DeepseekV3Config, config, folder)
    generator = torch.Generator().manual_seed(1)
    for own, shape in index_of(config).items():  # the MTP layer, which transformers has not
        if own not in state and own.endswith(("weight", "bias")):
            state[own] = torch.randn(shape, generator=generator).mul_(0.1).bfloat16()
            if "norm" in own:
                state[own] += 1
    for own in [own for own in index_of(config) if own.endswith("_scale_inv")]:
        weight = own.removesuffix("_scale_inv")
        state[weight], state[own], values = quantize(state[weight], (128, 128), scale_dtype)
        if not own.startswith("model.layers.3."):
            set_weight(model, weight, values)
    for own in [own for own in state if own.endswith("e_score_correction_bias")]:
        state[own] = state[own].float()
    assert set(state) == set(index_of(config))
    write_shards(folder, state, config)
    return Layout(folder, model)


def write_gpt_oss(
    folder: Path, name: str = "gpt-oss-20b", scale_dtype: torch.dtype = torch.uint8
) -> Layout:
    config = small(
        name, hidden_size=64, intermediate_size=32, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, num_local_experts=6, num_experts_per_tok=3,
        experts_per_token=3, initial_context_length=ORIGIN, sliding_window=13, swiglu_limit=1.5,
    )  # fmt: skip
    model, state = make_reference(GptOssForCausalLM, GptOssConfig, config, folder)
    generator = torch.Generator().manual_seed(1)
    for own, shape in index_of(config).items():
        if not own.endswith("_blocks"):
            continue
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape[:-1], generator=generator, dtype=torch.uint8)
        state[own] = blocks
        state[own.replace("_blocks", "_scales")] = scales.view(scale_dtype)
        weight = own.removesuffix("_blocks")
        del state[weight]
        model.get_parameter(weight).data.copy_(mxfp4_values(blocks, scales).transpose(1, 2))
    assert set(state) == set(index_of(config))
    write_shards(folder, state, config)
    return Layout(folder, model)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The low four bits of a byte come first; the highest of four is the sign."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*E2M1, *(-value for value in E2M1)])[codes]
    return (values * torch.exp2(scales.float() - 127)[..., None]).flatten(-2)


LAYOUTS: dict[str, Callable[[Path, str], Layout]] = {
    "Llama-3.1-8B-Instruct": write_llama,
    "Meta-Llama-3.1-8B-Instruct-FP8": write_llama,
    "Meta-Llama-3.1-70B-Instruct-FP8-dynamic": write_llama,
    "Llama-3.1-405B-Instruct-FP8": write_llama,
    "DeepSeek-R1": write_deepseek,
    "gpt-oss-20b": write_gpt_oss,
}
