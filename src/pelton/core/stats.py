# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the engine: what routing, metrics and reports read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges are as of now; names ending in `_total` only grow while the engine lives."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    """Usable blocks, summed over groups (the null blocks are not counted)."""
    num_used_blocks: int = 0
    """Held by a live request."""
    num_cached_blocks: int = 0
    """Free, but still holding a published hash."""
    batch_rows: int = 0
    """Rows of the newest step."""
    batch_tokens: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    preemptions_total: int = 0
    finished_total: int = 0
    cancelled_total: int = 0
    failed_total: int = 0
    decode_rows_total: int = 0
    """Rows that went on with an output."""
    decode_tokens_total: int = 0
    """What these rows gave: a token each, and one more for each draft accepted, unless that draft
    was the end of its output."""
    drafted_total: tuple[int, ...] = ()
    """Drafts verified, by their place: the first of a row, the second, and so on. Empty when
    speculative decoding is off."""
    accepted_total: tuple[int, ...] = ()
    """Drafts accepted, by their place."""
    num_receiving: int = 0
    """Running requests whose prompt another engine computes."""
    num_leased_blocks: int = 0
    """Held for other engines until these have copied them."""
    prefills_total: int = 0
    """Prompts computed for other engines."""
    pulls_total: int = 0
    """Prompts whose KV came from another engine."""
    pull_fallbacks_total: int = 0
    """Prompts whose KV did not come, and which are computed here instead."""
    pulled_bytes_total: int = 0
    pull_copy_s_total: float = 0.0
    """How long pulls had blocks that could be read and were not all here, summed over pulls."""

    @property
    def tokens_per_decode(self) -> float:
        """Mean new tokens of a decode row; 0 before the first."""
        if not self.decode_rows_total:
            return 0.0
        return self.decode_tokens_total / self.decode_rows_total


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What only a walk over all live requests can tell."""

    num_pending_tokens: int = 0
    """Prompt tokens of requests, waiting or running, that no step has been planned for. Those that
    a waiting request will find cached are counted."""
    num_computed_total: int = 0
    """Prompt tokens that steps were planned for while the engine lives."""
