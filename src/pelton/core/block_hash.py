# SPDX-License-Identifier: Apache-2.0
"""The hash chain that names a full KV block by its tokens and everything before them.

128-bit BLAKE2b, the same in every process and version: `h(parent, tokens)`, where the root of a
chain is the hash of its salt. The salt carries whatever else changes the KV of a token (model,
adapter, image, tenant), each part tagged with its domain so that two kinds never collide.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

BlockHash = bytes
"""16 bytes."""

_HASH_BYTES = 16


def make_root_hash(salt: Mapping[str, str]) -> BlockHash:
    """The parent of a chain's first block. `salt` maps a domain ("model", "tenant") to a value."""
    digest = blake2b(digest_size=_HASH_BYTES, person=b"pelton-root")
    for domain, value in sorted(salt.items()):
        for part in (domain, value):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Iterable[int]) -> BlockHash:
    """The hash of one full block whose predecessor in the chain is `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()


def make_request_salt(model: str, cache_salt: str) -> dict[str, str]:
    """The salt of a request's chain, the same in the engine and in whoever predicts its hits."""
    return {"model": model, "tenant": cache_salt}


def hash_prompt(
    token_ids: Sequence[int], block_size: int, salt: Mapping[str, str]
) -> list[BlockHash]:
    """The hashes of all full blocks of a prompt."""
    hashes: list[BlockHash] = []
    parent = make_root_hash(salt)
    for first in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[first : first + block_size])
        hashes.append(parent)
    return hashes
