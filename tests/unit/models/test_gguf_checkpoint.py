# SPDX-License-Identifier: Apache-2.0
"""GGUF files are written with the gguf package's own writer and read back."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import Vocabulary, open_checkpoint
from pelton.models.gguf_checkpoint import to_hf_name

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 4, 2, 16, 64, 40
KEYS: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": 96,
    "attention.head_count": NUM_HEADS,
    "attention.head_count_kv": NUM_KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5e5,
}


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of queries and keys."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **changes: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**KEYS, **changes}.items():
        if value is None:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(
            type(value), writer.add_array
        )
        add(key if key.startswith("tokenizer.") else f"{architecture}.{key}", value)
    embedding = np.zeros((VOCAB, WIDTH), np.float32)
    kinds = {"token_embd.weight": (embedding, gguf.GGMLQuantizationType.F32), **(tensors or {})}
    for name, (values, kind) in kinds.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind_name", KINDS)
def test_rows_of_queries_and_keys_return_to_their_order(tmp_path: Path, kind_name: str) -> None:
    kind = gguf.GGMLQuantizationType[kind_name]
    values = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    keys = values[: NUM_KV_HEADS * HEAD_DIM]
    tensors = {
        "blk.0.attn_q.weight": (interleave(values, NUM_HEADS), kind),
        "blk.0.attn_k.weight": (interleave(keys, NUM_KV_HEADS), kind),
        "blk.0.attn_v.weight": (keys, kind),
    }
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", tensors=tensors)))
    expected = gguf.dequantize(gguf.quants.quantize(values, kind), kind).reshape(values.shape)
    prefix = "model.layers.0.self_attn."
    for name, rows in (("q_proj", WIDTH), ("k_proj", len(keys)), ("v_proj", len(keys))):
        tensor = checkpoint.read(f"{prefix}{name}.weight")
        assert checkpoint.shape(f"{prefix}{name}.weight") == tuple(tensor.shape)
        assert torch.equal(tensor.float(), torch.from_numpy(expected[:rows].copy()))


def test_qwen2_rows_are_in_order_already(tmp_path: Path) -> None:
    values = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    tensors = {"blk.0.attn_q.weight": (values, gguf.GGMLQuantizationType.F32)}
    path = write_gguf(tmp_path / "m.gguf", architecture="qwen2", tensors=tensors)
    tensor = open_checkpoint(str(path)).read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(tensor, torch.from_numpy(values))


def test_many_blocks_decode_as_in_one_piece(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((9000, WIDTH)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    tensors = {"token_embd.weight": (values, kind)}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", tensors=tensors)))
    expected = gguf.dequantize(gguf.quants.quantize(values, kind), kind)
    tensor = checkpoint.read("model.embed_tokens.weight")
    assert torch.equal(tensor, torch.from_numpy(expected))


def test_metadata_becomes_a_config(tmp_path: Path) -> None:
    end_ids = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    path = write_gguf(tmp_path / "m.gguf", **end_ids)
    config = open_checkpoint(str(path)).config
    assert config["rms_norm_eps"] == 1e-5  # not the float32 nearest to it
    assert (config["rope_theta"], config["head_dim"], config["vocab_size"]) == (5e5, 16, VOCAB)
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == ([7, 9], True)
    assert config["model_type"] == "llama"


def test_a_window_makes_it_mistral_and_rope_factors_are_config(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 1, 2, 4, 8, 8], np.float32)
    tensors = {"rope_freqs.weight": (factors, gguf.GGMLQuantizationType.F32)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, **{"attention.sliding_window": 32})
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.config["model_type"], checkpoint.config["sliding_window"]) == ("mistral", 32)
    assert checkpoint.config["rope_scaling"]["factors"] == factors.tolist()
    assert "rope_freqs.weight" not in checkpoint.tensor_names


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "'gpt2'"),
        ({"architecture": "gpt-oss"}, "'gpt-oss'.*use the model's Hugging Face folder"),
        ({"architecture": "deepseek2"}, "'deepseek2'.*use the model's Hugging Face folder"),
        ({"expert_count": 8}, "mixture of experts.*use the model's Hugging Face folder"),
        ({"rope.dimension_count": 8}, r"rope\.dimension_count"),
        ({"attention.head_count": [4, 4]}, r"attention\.head_count.*integer"),
        ({"context_length": None}, "context_length"),
        ({"rope.freq_base": "x"}, r"rope\.freq_base"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(str(path)).config


def test_names_are_translated_or_kept() -> None:
    assert to_hf_name("blk.3.ffn_gate.weight") == "model.layers.3.mlp.gate_proj.weight"
    assert to_hf_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert to_hf_name("output.weight") == "lm_head.weight"
    assert to_hf_name("blk.3.ssm_a.weight") == "blk.3.ssm_a.weight"
    assert to_hf_name("mystery") == "mystery"


def test_vocabulary_is_read(tmp_path: Path) -> None:
    tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "é"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 99,
    }
    source = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", **tokenizer))).tokenizer
    assert isinstance(source, Vocabulary)
    assert (source.tokens, source.token_types) == (["a", "b", "é"], [1, 1, 3])
    assert source.special_token_ids == {"bos_token": 2}  # an id outside the vocabulary is no token


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "list of str"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1, 1]}, "token_type"),
        ({"tokenizer.ggml.tokens": ["a"]}, r"tokenizer\.ggml\.model"),
    ],
)
def test_broken_vocabularies_are_named(
    tmp_path: Path, tokenizer: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _ = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", **tokenizer))).tokenizer


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    """Every cut is found when the file is opened (the header) or its tensors are read."""
    vocabulary = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [0.0, 1.0]}
    whole = write_gguf(tmp_path / "whole.gguf", **vocabulary).read_bytes()
    end_of_data = whole.rindex(b"token_embd.weight")  # all that follows the names is padding
    path = tmp_path / "cut.gguf"
    for length in [*range(0, end_of_data + 40), len(whole) - 4096, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(str(path)).read("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**63), "number of tensors"),
        (16, struct.pack("<Q", 2**40), "number of keys"),
        (24, struct.pack("<Q", 2**62), "name of key 0"),
        (32, b"\xff\xff", "not UTF-8"),
    ],
)
def test_wild_headers_are_refused(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("kind", "message"), [(200, "type 200 is unknown.*Q4_K_M"), (24, "I8.*Q8_0")]
)
def test_unknown_tensor_types_name_the_tensor(tmp_path: Path, kind: int, message: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    name = b"token_embd.weight"
    kind_at = raw.rindex(name) + len(name) + 4 + 2 * 8  # after the number of axes and two sizes
    raw[kind_at : kind_at + 4] = struct.pack("<I", kind)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"token_embd\.weight.*{message}"):
        open_checkpoint(str(path)).read("model.embed_tokens.weight")


def test_smollm2_is_whole(smollm2_checkpoint) -> None:
    config = smollm2_checkpoint.config
    assert smollm2_checkpoint.name == "smollm2"
    assert (config["num_hidden_layers"], config["vocab_size"]) == (30, 49152)
    assert (config["rope_theta"], config["max_position_embeddings"]) == (100000.0, 8192)
    assert config["eos_token_id"] == [2]
    assert len(smollm2_checkpoint.tensor_names) == 272
    assert smollm2_checkpoint.read("model.norm.weight").dtype is torch.float32
