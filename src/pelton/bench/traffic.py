# SPDX-License-Identifier: Apache-2.0
"""The prompts that load is made of: bundled English text, a user's file, or synthetic token ids.

A data set is decided before anything starts, the same for the same arguments and seed, and named
in the record by its hash. Synthetic prompts measure speed only: they are called synthetic.
"""

import hashlib
import random
import re
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import msgspec

from pelton.core.errors import ConfigError

DEFAULT_MAX_TOKENS = 128
_PASSAGE_WORDS = 110
_NUM_PASSAGES = 100
_SYNTHETIC_TOKEN_BUDGET = 2_000_000
_ASSUMED_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt, in exactly one of three forms."""

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    input_tokens: list[int] | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    ignore_eos: bool = False
    """The output has max_tokens tokens exactly: synthetic data only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    name: str
    samples: list[Sample]
    is_synthetic: bool
    description: str
    seed: int | None = None
    """What synthetic tokens were drawn with."""

    @property
    def sha256(self) -> str:
        """Of the samples alone: the same prompts under another name hash the same."""
        return hashlib.sha256(msgspec.json.encode(self.samples)).hexdigest()


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    input_tokens: list[int] | None = None
    max_tokens: int | None = None


def load_data_set(name: str, *, output_len: int = 0) -> DataSet:
    """The data set `name`: 'bundled', 'prompts', 'passages', or a path ending in .jsonl.

    `output_len` > 0 caps every sample's output. A file that cannot be used is a `ConfigError`
    that names the line.
    """
    if name == "prompts":
        data_set = _load_prompts()
    elif name == "passages":
        data_set = _load_passages()
    elif name == "bundled":
        samples = _load_prompts().samples + _load_passages().samples
        data_set = DataSet(
            name=name, samples=samples, is_synthetic=False,
            description="Prompts written for Pelton and passages of Python's documentation",
        )  # fmt: skip
    elif name.endswith(".jsonl"):
        data_set = _load_file(Path(name))
    else:
        raise ConfigError(
            f"--dataset must be 'bundled', 'prompts', 'passages' or a .jsonl file, got {name!r}.",
            param="dataset",
        )
    if not output_len:
        return data_set
    capped = [
        replace(sample, max_tokens=min(sample.max_tokens, output_len))
        for sample in data_set.samples
    ]
    return replace(data_set, samples=capped)


def make_synthetic(
    *, input_len: int, output_len: int, seed: int, vocab_size: int | None
) -> DataSet:
    """Prompts of `input_len` token ids drawn uniformly, each answered by `output_len` tokens.

    Ids stay clear of both ends of the vocabulary, where special tokens live. An unknown
    vocabulary (a server that does not say) is taken to hold at least 32,000 ids.
    """
    vocab = vocab_size or _ASSUMED_VOCAB_SIZE
    low, high = min(256, vocab // 4), min(vocab, _ASSUMED_VOCAB_SIZE)
    num_samples = max(64, min(1024, _SYNTHETIC_TOKEN_BUDGET // input_len))
    generator = random.Random(seed)
    ids = range(low, high)
    samples = [
        Sample(
            input_tokens=generator.choices(ids, k=input_len),
            max_tokens=output_len,
            ignore_eos=True,
        )
        for _ in range(num_samples)
    ]
    return DataSet(
        name=f"synthetic-{input_len}-{output_len}", samples=samples, is_synthetic=True, seed=seed,
        description=f"Synthetic: random token ids, {input_len} in, {output_len} out",
    )  # fmt: skip


def _load_prompts() -> DataSet:
    source = resources.files("pelton.bench").joinpath("data/prompts.jsonl")
    samples = [
        _parse_row(line, where=f"prompts.jsonl line {number}")
        for number, line in enumerate(source.read_bytes().splitlines(), start=1)
    ]
    return DataSet(
        name="prompts", samples=samples, is_synthetic=False,
        description="English prompts on many subjects, written for Pelton",
    )  # fmt: skip


def _load_passages() -> DataSet:
    """Passages of about a hundred words, spread evenly over the topics that come with Python."""
    from pydoc_data.topics import topics

    passages = [
        passage for topic in sorted(topics) for passage in _cut_passages(str(topics[topic]))
    ]
    step = max(1, len(passages) // _NUM_PASSAGES)
    samples = [
        Sample(
            messages=[
                {
                    "role": "user",
                    "content": "Say in two sentences what this passage is about.\n\n" + passage,
                }
            ]
        )
        for passage in passages[::step][:_NUM_PASSAGES]
    ]
    return DataSet(
        name="passages", samples=samples, is_synthetic=False,
        description="Passages of the documentation that comes with Python, to be summarised",
    )  # fmt: skip


def _cut_passages(text: str) -> list[str]:
    """Runs of whole paragraphs of prose (not tables, grammars or listings), each long enough."""
    passages: list[str] = []
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        is_prose = paragraph.count(" ") > 12 and not re.search(r"::=|>>>|[*=~+-]{4,}", paragraph)
        if is_prose:
            words += paragraph.split()
        if len(words) >= _PASSAGE_WORDS:
            passages.append(" ".join(words[: 2 * _PASSAGE_WORDS]))
            words = []
    return passages


def _load_file(path: Path) -> DataSet:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"The data set {path} cannot be read: {error.strerror}.", param="dataset"
        ) from error
    samples = [
        _parse_row(line, where=f"{path} line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not samples:
        raise ConfigError(
            f"The data set {path} holds no rows; a row is a line of JSON with prompt, messages or "
            "input_tokens.", param="dataset",
        )  # fmt: skip
    return DataSet(
        name=path.name, samples=samples, is_synthetic=False, description=f"The user's {path.name}"
    )


def _parse_row(line: bytes, *, where: str) -> Sample:
    try:
        row = msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: {error}; a row holds one of prompt, messages or input_tokens, and "
            "optionally max_tokens.", param="dataset",
        ) from error  # fmt: skip
    given = [
        name for name in ("prompt", "messages", "input_tokens") if getattr(row, name) is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ConfigError(
            f"{where}: a row holds exactly one of prompt, messages or input_tokens, found {found}.",
            param="dataset",
        )
    if not getattr(row, given[0]):
        raise ConfigError(f"{where}: {given[0]} must not be empty.", param="dataset")
    max_tokens = DEFAULT_MAX_TOKENS if row.max_tokens is None else row.max_tokens
    if max_tokens < 2:
        raise ConfigError(
            f"{where}: max_tokens must be at least 2 (time per output token is undefined for one "
            f"token), got {max_tokens}.", param="dataset",
        )  # fmt: skip
    if row.input_tokens is not None and min(row.input_tokens) < 0:
        raise ConfigError(f"{where}: input_tokens must not be negative.", param="dataset")
    return Sample(
        prompt=row.prompt, messages=row.messages, input_tokens=row.input_tokens,
        max_tokens=max_tokens,
    )  # fmt: skip
