# SPDX-License-Identifier: Apache-2.0
"""GGUF files: names and metadata in Hugging Face's terms, tensors dequantised as they are read.

llama.cpp stores the query and key rows of the `llama` architecture in the order of its own rotary
convention (pairs interleaved); reading puts them back into the two halves Hugging Face rotates.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import TokenizerFile, Vocabulary
from pelton.models.gguf_header import TensorInfo, map_file, read_header

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BLOCKS = 8192
"""Quantised blocks decoded at a time: large enough for numpy, small enough for the cache."""

_CLASS_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class GGUFCheckpoint:
    def __init__(self, path: Path, name: str = "") -> None:
        self.path = path
        self.name = name or path.stem
        self._data = map_file(path)
        header = read_header(path, self._data)
        self._metadata = header.metadata
        self._infos = {to_hf_name(key): info for key, info in header.tensors.items()}
        self._architecture = self._text("general.architecture")
        if self._architecture not in _CLASS_NAMES:
            raise CheckpointError(
                f"{path} has the architecture {self._architecture!r}; GGUF files of "
                f"{' and '.join(_CLASS_NAMES)} are supported; use the model's Hugging Face folder."
            )
        self._rope_factors = self._infos.pop(_ROPE_FACTORS, None)

    @property
    def tensor_names(self) -> Sequence[str]:
        return tuple(self._infos)

    @property
    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        num_heads = self._integer("attention.head_count")
        hidden_size = self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden_size // max(num_heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._integer(key, head_dim) != head_dim:
                raise CheckpointError(
                    f"{self._architecture}.{key} in {self.path} must equal the head size "
                    f"({head_dim}), got {self._integer(key)}."
                )
        if self._integer("expert_count", 0):
            raise CheckpointError(
                f"{self.path} is a mixture of experts, which is not supported as GGUF; use the"
                " model's Hugging Face folder."
            )
        window = self._integer("attention.sliding_window", 0)
        is_mistral = self._architecture == "llama" and window > 0
        class_name = "MistralForCausalLM" if is_mistral else _CLASS_NAMES[self._architecture]
        return {
            "architectures": [class_name],
            "model_type": "mistral" if is_mistral else self._architecture,
            "num_hidden_layers": self._integer("block_count"),
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("feed_forward_length"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "max_position_embeddings": self._integer("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-6),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._infos,
            "sliding_window": window or None,
            "use_sliding_window": window > 0,
            "tie_word_embeddings": "lm_head.weight" not in self._infos,
            "dtype": "float32" if self._metadata.get("general.file_type") == 0 else "bfloat16",
            "bos_token_id": self._metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
        }

    @cached_property
    def tokenizer(self) -> TokenizerFile | Vocabulary:
        prefix = "tokenizer.ggml."
        tokens = self._list(prefix + "tokens", str)
        if not tokens:
            raise CheckpointError(
                f"{self.path} holds no tokenizer (tokenizer.ggml.tokens); use the model's"
                " Hugging Face folder."
            )
        token_types = self._list(prefix + "token_type", int) or [1] * len(tokens)
        if len(token_types) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type in {self.path} has {len(token_types)} entries for "
                f"{len(tokens)} tokens."
            )
        ids = {role: self._metadata.get(prefix + key) for role, key in _SPECIAL_TOKENS.items()}
        model = self._text(prefix + "model")
        is_sentencepiece = model == "llama"
        return Vocabulary(
            path=self.path,
            model=model,
            pre_tokenizer=self._metadata.get(prefix + "pre", "default"),
            tokens=tokens,
            token_types=token_types,
            merges=self._list(prefix + "merges", str),
            scores=self._list(prefix + "scores", float),
            special_token_ids={
                role: index
                for role, index in ids.items()
                if isinstance(index, int) and 0 <= index < len(tokens)
            },
            add_bos=bool(self._metadata.get(prefix + "add_bos_token", is_sentencepiece)),
            add_space_prefix=bool(
                self._metadata.get(prefix + "add_space_prefix", is_sentencepiece)
            ),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def read(self, name: str) -> "Tensor":
        import torch

        array = self._array(self._info(name), self._num_permuted_heads(name))
        if array.dtype == np.uint16:  # numpy has no bfloat16
            return torch.from_numpy(array).view(torch.bfloat16)
        return torch.from_numpy(array)

    def _info(self, name: str) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; download the file again.")
        return info

    def _num_permuted_heads(self, name: str) -> int:
        """How many heads' rows are in llama.cpp's order; 0: none."""
        if self._architecture != "llama":
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0

    def _array(self, info: TensorInfo, num_permuted_heads: int = 0) -> "np.ndarray[Any, Any]":
        """float32, float16, or the bits of bfloat16 as uint16; in the tensor's shape."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        try:
            kind = GGMLQuantizationType(info.ggml_type)
        except ValueError as error:
            raise self._broken(
                info, f"its type {info.ggml_type} is unknown; use a Q4_K_M, Q8_0 or F16 file"
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if not info.shape or 0 in info.shape or info.shape[-1] % block_size:
            raise self._broken(info, f"its shape {info.shape} does not divide into blocks")
        num_blocks = int(np.prod(info.shape)) // block_size
        end = info.offset + num_blocks * block_bytes
        if end > len(self._data):
            raise self._broken(info, f"it ends at byte {end} and the file at {len(self._data)}")
        raw = np.frombuffer(self._data, np.uint8, num_blocks * block_bytes, info.offset)
        if num_permuted_heads:
            if info.shape[0] % (2 * num_permuted_heads):
                raise self._broken(
                    info, f"its shape {info.shape} does not fit {num_permuted_heads} heads"
                )
            raw = _undo_permutation(raw.reshape(info.shape[0], -1), num_permuted_heads)
        plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(kind.name)
        if plain is not None:
            return raw.reshape(-1).view(plain).reshape(info.shape)
        decoder = getattr(quants, kind.name, None)
        if decoder is None:
            raise self._broken(
                info, f"its type {kind.name} is not supported; use a Q4_K_M, Q8_0 or F16 file"
            )
        decoder.init_grid()
        blocks = raw.reshape(num_blocks, block_bytes)
        values = np.empty((num_blocks, block_size), np.float32)
        for start in range(0, num_blocks, CHUNK_BLOCKS):
            chunk = slice(start, start + CHUNK_BLOCKS)
            values[chunk] = decoder.dequantize_blocks(blocks[chunk])
        return values.reshape(info.shape)

    def _broken(self, info: TensorInfo, why: str) -> CheckpointError:
        return CheckpointError(f"Tensor {info.name!r} in {self.path} cannot be read: {why}.")

    def _rope_scaling(self) -> dict[str, Any] | None:
        if self._rope_factors is not None:
            return {"rope_type": "factors", "factors": self._array(self._rope_factors).tolist()}
        kind = self._metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0)}

    def _eos_token_ids(self) -> list[int]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = [self._metadata[key] for key in keys if key in self._metadata]
        return list(dict.fromkeys(ids))

    def _text(self, key: str) -> str:
        value = self._metadata.get(key)
        if not isinstance(value, str):
            raise CheckpointError(f"{key} in {self.path} must be a string, got {value!r}.")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        key = f"{self._architecture}.{key}"
        value = self._metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{key} in {self.path} must be an integer, got {value!r}.")
        return value

    def _number(self, key: str, default: float) -> float:
        key = f"{self._architecture}.{key}"
        value = self._metadata.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise CheckpointError(f"{key} in {self.path} must be a number, got {value!r}.")
        # Stored as float32: 1e-05 there is not 1e-05 here, and the shortest decimal is meant.
        return float(str(np.float32(value)))

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self._metadata.get(key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
            raise CheckpointError(f"{key} in {self.path} must be a list of {kind.__name__}.")
        return value


def to_hf_name(name: str) -> str:
    """ "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight"; unknown names stay."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, middle, kind = match.groups()
        if middle in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[middle]}.{kind}"
    stem, _, kind = name.rpartition(".")
    return f"{_GLOBAL_NAMES[stem]}.{kind}" if stem in _GLOBAL_NAMES else name


def _undo_permutation(rows: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Interleaved pairs of rows to the two halves of each head. Rows move whole, so this works on
    the bytes of quantised rows too."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
