# SPDX-License-Identifier: Apache-2.0
"""The keys of digests: made on both sides from the prompt, so blocks of another do not match."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def hash_tokens(token_ids: Sequence[int]) -> bytes:
    return blake2b(array("I", token_ids).tobytes(), digest_size=16).digest()


def make_key(prompt_hash: bytes, group: int, first_entry: int) -> bytes:
    return prompt_hash + group.to_bytes(2, "little") + first_entry.to_bytes(4, "little")
