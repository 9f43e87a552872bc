# SPDX-License-Identifier: Apache-2.0
"""The bytes each token stands for, so that decoding is a lookup and a join.

Tokenizers of language models decode token by token into bytes, and only then into text. Two kinds
are known: byte-level BPE, whose token texts spell bytes in an alphabet of 256 printable characters,
and SentencePiece, whose tokens are text with "▁" for a space and "<0xNN>" for a lone byte.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from pelton.core.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    table: list[bytes]
    """By token id; ids without a token are empty."""
    strips_leading_space: bool
    """Whether the text of a whole sequence drops the space its first word was given."""


def make_token_bytes(tokenizer: Tokenizer, size: int) -> TokenBytes:
    """`size`: least length of the table. A decoder of another kind: `CheckpointError`."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(size, max(vocabulary.values(), default=-1) + 1)
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        to_byte = {ord(char): byte for byte, char in enumerate(_byte_alphabet())}
        alphabet = frozenset(_byte_alphabet())
        for text, token_id in vocabulary.items():
            # A token added with characters outside the alphabet stands for its own text.
            if alphabet.issuperset(text):
                table[token_id] = text.translate(to_byte).encode("latin-1")
            else:
                table[token_id] = text.encode()
        return TokenBytes(table, strips_leading_space=False)
    if not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} or not kinds:
        raise CheckpointError(
            f"The tokenizer's decoder ({', '.join(kinds) or 'none'}) is not supported; supported "
            "are byte-level BPE and SentencePiece."
        )
    has_byte_tokens = "ByteFallback" in kinds
    for text, token_id in vocabulary.items():
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(text)):
            table[token_id] = bytes.fromhex(match[1])
        else:
            table[token_id] = text.replace("▁", " ").encode()
    return TokenBytes(table, strips_leading_space=any(map(_strips_space, steps)))


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("start", 0) > 0)


def _byte_alphabet() -> str:
    """The character that spells each byte: itself where that is printable Latin-1 and not a space,
    else the next unused one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))
