# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: what followed the last few tokens where they came before in the same request.

After Saxena, "Prompt Lookup Decoding" (2023). Good where output repeats its input: quotes, edits,
code, tables. Costs a substring search over packed token ids, microseconds at thousands of tokens.
"""

from array import array
from collections.abc import Sequence

_LENGTHS = (3, 4, 5)
"""Tokens that must match, shortest first: where three were never seen, neither were more."""
_MAX_TOKENS_BACK = 16384
"""How far back the search goes: bounds its time."""
_BYTES = 4


def propose_ngram(token_ids: Sequence[int], packed: bytearray, max_drafts: int) -> list[int]:
    """Up to `max_drafts` tokens that may follow `token_ids`; none where its end is new.

    `packed` keeps the ids as int32 from call to call: it starts empty and is brought up to date
    here. The newest of the longest matches counts. A match that overlaps the end goes on with
    its own guesses, as text that repeats with a short period does.
    """
    packed += array("i", token_ids[len(packed) // _BYTES :]).tobytes()
    following = None
    for length in _LENGTHS:
        found = _find_last(packed, length)
        if found is None:
            break
        following = found + length
    if following is None:
        return []
    period = len(token_ids) - following
    drafts = list(token_ids[following : following + max_drafts])
    while len(drafts) < max_drafts:
        drafts.append(drafts[len(drafts) - period])
    return drafts


def _find_last(packed: bytearray, length: int) -> int | None:
    """The newest place before the last where the last `length` tokens stand."""
    size = length * _BYTES
    if len(packed) <= size:
        return None
    pattern = packed[-size:]
    first = max(0, len(packed) - _MAX_TOKENS_BACK * _BYTES)
    place = packed.rfind(pattern, first, len(packed) - _BYTES)
    while place >= 0 and place % _BYTES:
        # The bytes match across the borders of ids.
        place = packed.rfind(pattern, first, place + size - 1)
    return place // _BYTES if place >= 0 else None
