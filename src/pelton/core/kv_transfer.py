# SPDX-License-Identifier: Apache-2.0
"""What an engine that decodes and one that prefills tell each other about KV: no tensors.

Block tables of both sides have an entry for every `block_size` tokens, so entries name the same
tokens on both; block ids mean something in one engine only.
"""

from dataclasses import dataclass, field, fields

from pelton.core.geometry import KVGroup
from pelton.core.request import GenerateRequest
from pelton.core.trace import Phase

KV_FORMAT_VERSION = 2
"""Changes when the bytes of a block, or the meaning of a message about blocks, do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What two engines must have in common for a block of one to be a block of the other."""

    model: str
    fingerprint: str
    """Of the weights, by samples."""
    dtype: str
    """Of keys and values."""
    block_size: int
    groups: tuple[KVGroup, ...]
    """Layers, heads and windows; the layers of an MTP drafter are among them."""
    format_version: int = KV_FORMAT_VERSION


def explain_mismatch(mine: KVLayout, theirs: KVLayout) -> str | None:
    """One sentence about the first difference that keeps blocks from being exchanged."""
    for item in fields(KVLayout):
        here, there = getattr(mine, item.name), getattr(theirs, item.name)
        if here != there:
            what = item.name.replace("_", " ")
            return (
                f"KV cannot move between these workers, as their {what} differs ({here} here,"
                f" {there} there): start both from one installation with the same model, --dtype,"
                " --kv-cache-dtype, --block-size and --speculative."
            )
    return None


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Consecutive entries of one group's block table."""

    first_entry: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class PullOrder:
    """The blocks that the KV of a prompt, all but its last token, is to be put into."""

    request: GenerateRequest
    ranges: list[BlockRange]
    """One for each group. What the engine has cached, or no window will reach, is not in them."""


@dataclass(frozen=True, slots=True)
class PullResult:
    request_id: str
    error: str | None
    """None: every block has arrived and was checked."""
    num_cached_tokens: int = 0
    """Of the prompt, where it was computed."""
    num_bytes: int = 0
    copy_s: float = 0.0
    """How long there were blocks that could be read and were not all here."""
    phases: list[Phase] = field(default_factory=list)
    """Of a traced request, in the engine that computed the prompt."""


@dataclass(frozen=True, slots=True)
class LeaseNews:
    """Blocks of a lease that can be read now, or the reason why no more will come."""

    lease_id: str
    owner: bytes
    ranges: list[BlockRange]
    """One for each group; those without new blocks are empty."""
    is_last: bool
    num_cached_tokens: int = 0
    error: str | None = None
