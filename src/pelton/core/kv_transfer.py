# SPDX-License-Identifier: Apache-2.0
"""What an engine that decodes and one that prefills tell each other about KV: no tensors.

Block tables of both sides have an entry for every `block_size` tokens, so entries name the same
tokens on both; block ids mean something in one engine only.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from pelton.core.geometry import KVGroup
from pelton.core.request import GenerateRequest
from pelton.core.trace import Phase

KV_FORMAT_VERSION = 4
"""Changes when the bytes of a block, how they are digested, or the meaning of a message about
blocks do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """What two engines must have in common for a block of one to be a block of the other, and for a
    request of one to go on in the other as if nothing had happened."""

    model: str
    device: str
    """"cpu" or "cuda", which round differently and are reached in different ways."""
    fingerprint: str
    """Of the weights, by samples."""
    dtype: str
    """Of keys and values."""
    block_size: int
    groups: tuple[KVGroup, ...]
    """Layers, heads and windows; the layers of an MTP drafter are among them."""
    format_version: int = KV_FORMAT_VERSION


def explain_mismatch(
    mine: KVLayout, theirs: KVLayout, here: str = "here", there: str = "there"
) -> str | None:
    """One sentence about the first difference. `here` and `there`: where the two are."""
    if mine == theirs:
        return None
    what, my_value, their_value = _find_difference(mine, theirs)
    return (
        f"These workers cannot take over KV or requests from each other, as their {what} differs"
        f" ({my_value} {here}, {their_value} {there}): start all from one installation, with the"
        " same files of the model, --device, --dtype, --kv-cache-dtype, --block-size and"
        " --speculative."
    )


def _find_difference(mine: Any, theirs: Any) -> tuple[str, object, object]:
    """The first field of two dataclasses that differs, and both values."""
    names = [item.name for item in fields(mine)]
    name = next(name for name in names if getattr(mine, name) != getattr(theirs, name))
    what, here, there = name.replace("_", " "), getattr(mine, name), getattr(theirs, name)
    if isinstance(here, tuple) and len(here) != len(there):
        return f"number of {what}", len(here), len(there)
    if name != "groups":
        return what, here, there
    group, other = next(pair for pair in zip(here, there, strict=True) if pair[0] != pair[1])
    what, here, there = _find_difference(group, other)
    return f"{what} of group {group.name!r}", here, there


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
