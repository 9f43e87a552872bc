# SPDX-License-Identifier: Apache-2.0
"""Whether a run counts, why not, and which limit binds. Stricter than LoadGen, never milder."""

from collections.abc import Sequence

import msgspec

from pelton.bench.scenarios.policy import Limits


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    is_valid: bool
    reasons: list[str]
    """A sentence each; empty when valid."""
    binding_limit: str
    """"ttft", "tpot", or "none" where nothing is limited: the one whose p99 comes closer to its
    limit, or is further over it."""
    ttft_share: float | None
    """p99 over its limit: above 1 is too slow."""
    tpot_share: float | None


def judge(
    *,
    limits: Limits,
    ttft_p99_ms: float | None,
    tpot_p99_ms: float | None,
    loadgen_reasons: Sequence[str],
    num_failed: int,
    commonest_error: str,
    num_cached_tokens: int | None,
    may_reuse_prefixes: bool,
    aborted: str | None,
) -> Verdict:
    """`loadgen_reasons` are LoadGen's own, empty when it calls the run valid."""
    ttft_share = _share(ttft_p99_ms, limits.ttft_ms)
    tpot_share = _share(tpot_p99_ms, limits.tpot_ms)
    reasons = [f"The run ended early: {aborted}"] if aborted else list(loadgen_reasons)
    if num_failed:
        reasons.append(f"{num_failed} requests failed, most with: {commonest_error}")
    for name, share, value, limit in (
        ("TTFT", ttft_share, ttft_p99_ms, limits.ttft_ms),
        ("TPOT", tpot_share, tpot_p99_ms, limits.tpot_ms),
    ):
        if share is not None and share > 1:
            reasons.append(f"The p99 {name} of {value:.1f} ms is over its limit of {limit:g} ms.")
    if num_cached_tokens and not may_reuse_prefixes:
        reasons.append(
            f"{num_cached_tokens} prompt tokens were reused from other requests, which the run "
            "does not allow (--prefix-cache)."
        )
    return Verdict(
        is_valid=not reasons,
        reasons=reasons,
        binding_limit=_find_binding(ttft_share, tpot_share),
        ttft_share=ttft_share,
        tpot_share=tpot_share,
    )


def _share(value: float | None, limit: float | None) -> float | None:
    return None if value is None or limit is None else value / limit


def _find_binding(ttft_share: float | None, tpot_share: float | None) -> str:
    shares = {
        name: share
        for name, share in (("ttft", ttft_share), ("tpot", tpot_share))
        if share is not None
    }
    return max(shares, key=lambda name: shares[name]) if shares else "none"
