# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: config.json, safetensors in one file or in shards, tokenizer.json."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from pelton.core.errors import CheckpointError, reason_of
from pelton.models.checkpoint import TokenizerFile, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16", "U8", "F8_E4M3", "F8_E8M0")
FORMAT_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files in which older checkpoints of a format name it, instead of in config.json."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class HFCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        config = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json", required=False)
        if generation.get("eos_token_id") is not None:
            config["eos_token_id"] = generation["eos_token_id"]
        for file, method in FORMAT_FILES.items():
            if not config.get("quantization_config") and (path / file).is_file():
                config["quantization_config"] = {"quant_method": method}
        self.config: Mapping[str, Any] = config
        self._readers: dict[Path, Any] = {}

    @property
    def tensor_names(self) -> Sequence[str]:
        return tuple(self._files)

    @cached_property
    def tokenizer(self) -> TokenizerFile | Vocabulary:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{self.path} has no tokenizer.json; download it, too.")
        settings = self._tokenizer_config
        special_tokens = {role: _token_text(settings.get(role)) for role in _SPECIAL_TOKENS}
        add_bos = settings.get("add_bos_token")
        return TokenizerFile(
            path=file,
            special_tokens={role: text for role, text in special_tokens.items() if text},
            add_bos=add_bos if isinstance(add_bos, bool) else None,
        )

    @cached_property
    def chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return _read_text(file)
        template = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {item.get("name"): item.get("template") for item in template if item}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._file_of(name)
        part = self._header(file).get_slice(name)
        if part.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"Tensor {name!r} in {file} has the type {part.get_dtype()}; supported are "
                f"{', '.join(DTYPES)}."
            )
        return tuple(part.get_shape())

    def read(self, name: str) -> "Tensor":
        file = self._file_of(name)
        if file not in self._readers:
            self._readers[file] = _open_safetensors(file, "pt")
        try:
            tensor: Tensor = self._readers[file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"Tensor {name!r} in {file} cannot be read: {error}.") from error
        return tensor

    def _file_of(self, name: str) -> Path:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; download the folder again.")
        return self._files[name]

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        single, index = self.path / SINGLE_FILE, self.path / INDEX_FILE
        if single.is_file():
            return dict.fromkeys(self._header(single).keys(), single)
        if not index.is_file():
            raise CheckpointError(
                f"{self.path} has neither {SINGLE_FILE} nor {INDEX_FILE}; download the folder"
                " again."
            )
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) for v in names.values()):
            raise CheckpointError(f"weight_map in {index} must map tensor names to file names.")
        files = {name: self.path / file for name, file in names.items()}
        self._check_shards(index, files)
        return files

    def _check_shards(self, index: Path, files: dict[str, Path]) -> None:
        for file in dict.fromkeys(files.values()):
            if file.parent != self.path or not file.is_file():
                raise CheckpointError(
                    f"{index} names the shard {file.name!r}, which is missing; download it, too."
                )
            held = set(self._header(file).keys())
            named = {name for name, shard in files.items() if shard == file}
            for name in sorted(named - held):
                raise CheckpointError(f"{index} says {file.name} holds {name!r}, but it does not.")
            # A tensor outside the index would be left out silently.
            for name in sorted(held - named):
                raise CheckpointError(
                    f"{file} holds {name!r}, which {index.name} does not place there."
                )

    @cached_property
    def _headers(self) -> dict[Path, Any]:
        return {}

    def _header(self, file: Path) -> Any:
        """The file opened for names and shapes only, which needs no torch."""
        if file not in self._headers:
            self._headers[file] = _open_safetensors(file, "np")
        return self._headers[file]

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return _read_json(self.path / "tokenizer_config.json", required=False)


def _open_safetensors(file: Path, framework: str) -> Any:
    try:
        return safe_open(str(file), framework=framework)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {reason_of(error)}.") from error


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {reason_of(error)}.") from error


def _read_json(file: Path, *, required: bool = True) -> dict[str, Any]:
    if not file.exists():
        if required:
            raise CheckpointError(f"{file} is missing; name a folder that holds a whole model.")
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise CheckpointError(f"{file} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object.")
    return value


def _token_text(token: Any) -> str:
    """A special token is given as its text or as an object with its text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
