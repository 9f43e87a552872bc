# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a tokenizer from the vocabulary inside a GGUF file.

GGUF names the rule that splits text before merging (`tokenizer.ggml.pre`) but not what it is; the
rules known here are those of the models' own tokenizer.json files.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pelton.core.errors import CheckpointError
from pelton.models.checkpoint import Vocabulary

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def make_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Raises `CheckpointError` for a kind or a splitting rule that is not known."""
    try:
        if vocabulary.model == "gpt2":
            tokenizer = _byte_level(vocabulary)
        elif vocabulary.model == "llama":
            tokenizer = _sentencepiece(vocabulary)
        else:
            raise CheckpointError(
                f"tokenizer.ggml.model in {vocabulary.path} is {vocabulary.model!r}; supported are "
                "'gpt2' and 'llama'."
            )
    except CheckpointError:
        raise
    except Exception as error:  # the library raises the bare class for merges that do not fit
        raise CheckpointError(
            f"The tokenizer in {vocabulary.path} is broken: {str(error).strip()}."
        ) from error
    pairs = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text, kind in pairs if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in pairs if kind == _USER_DEFINED]
    )
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    rule = _SPLITTERS.get(vocabulary.pre_tokenizer)
    if rule is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre in {vocabulary.path} is {vocabulary.pre_tokenizer!r}; supported "
            f"are {', '.join(_SPLITTERS)}."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.merges]
    if not all(len(merge) == 2 for merge in merges):
        raise CheckpointError(
            f"tokenizer.ggml.merges in {vocabulary.path} must be pairs of tokens."
        )
    # Llama 3 takes a whole word that is a token as it is, without merging up to it.
    is_llama3 = rule is _split_llama3
    model = models.BPE(_ids(vocabulary), merges, ignore_merges=is_llama3)  # type: ignore[arg-type]
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = rule()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_smollm() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _split_gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _split_llama3() -> Any:
    return _split_by(_LLAMA3_PATTERN)


def _split_qwen2() -> Any:
    return _split_by(_QWEN2_PATTERN)


def _split_by(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_SPLITTERS: dict[str, Callable[[], Any]] = {
    "smollm": _split_smollm,
    "gpt-2": _split_gpt2,
    "llama-bpe": _split_llama3,
    "llama3": _split_llama3,
    "qwen2": _split_qwen2,
}


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    tokens = vocabulary.tokens
    unknown = vocabulary.special_token_ids.get("unk_token")
    model = models.BPE(
        _ids(vocabulary),
        _merges_by_score(vocabulary),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = []
    if vocabulary.add_space_prefix:
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges whichever neighbours make the token of the highest score: every way to
    split a token in two tokens is a merge of that token's rank."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"tokenizer.ggml.scores in {vocabulary.path} has {len(vocabulary.scores)} entries for "
            f"{len(vocabulary.tokens)} tokens."
        )
    ids = _ids(vocabulary)
    ranked = []
    for token_id, text in enumerate(vocabulary.tokens):
        if vocabulary.token_types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(text)):
            left, right = ids.get(text[:cut]), ids.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-vocabulary.scores[token_id], token_id, left, right))
    ranked.sort()
    tokens = vocabulary.tokens
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
