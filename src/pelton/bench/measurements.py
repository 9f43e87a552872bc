# SPDX-License-Identifier: Apache-2.0
"""What is kept of every request, and the figures made from it: exact, from raw values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

PERCENTILES = (50, 90, 99)
BUCKET_NS = 100_000_000
"""Width of the time line of arriving tokens."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Times are `time.time_ns`, LoadGen's clock; 0: never."""

    request_id: str
    sample_index: int
    scheduled_ns: int = 0
    """When LoadGen's schedule wanted it out: latencies count from here."""
    issued_ns: int = 0
    """When LoadGen handed it over."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    """None: the system under test does not say."""
    finish_reason: str | None = None
    error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.finish_reason is not None

    @property
    def ttft_ms(self) -> float:
        return (self.first_token_ns - self.scheduled_ns) / 1e6

    @property
    def tpot_ms(self) -> float:
        """Mean over the tokens after the first."""
        return (self.last_token_ns - self.first_token_ns) / 1e6 / (self.num_output_tokens - 1)


class Distribution(msgspec.Struct, frozen=True):
    """Of one latency, milliseconds."""

    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    num_requests: int
    num_ok: int
    num_failed: int
    duration_s: float
    """From the first scheduled request to the last token."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    """Prompt tokens that were reused. None: the system under test does not say."""
    ttft_ms: Distribution | None
    """None where no request was answered."""
    tpot_ms: Distribution | None
    issue_delay_p99_ms: float | None
    """How late LoadGen handed requests over: what the client itself adds to TTFT at most."""
    errors: dict[str, int]
    """Message to count, the commonest first, at most ten."""
    finish_reasons: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Totals:
    prompt: int
    output: int


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value at rank floor(n x percent / 100) of the ordered values: LoadGen's definition."""
    assert ordered, "a percentile of nothing"
    return ordered[min(len(ordered) - 1, math.floor(len(ordered) * percent / 100))]


def make_distribution(values: Sequence[float]) -> Distribution | None:
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Distribution(
        mean=math.fsum(ordered) / len(ordered),
        min=ordered[0], p50=p50, p90=p90, p99=p99, max=ordered[-1],
    )  # fmt: skip


def summarise(records: Sequence[RequestRecord]) -> Summary:
    """Figures over `records`. Latencies and tokens are those of answered requests; the others
    are counted as failed."""
    ok = [record for record in records if record.is_ok]
    start_ns = min((record.scheduled_ns for record in records), default=0)
    end_ns = max((record.last_token_ns for record in ok), default=start_ns)
    duration_s = (end_ns - start_ns) / 1e9
    totals = _Totals(
        prompt=sum(record.num_prompt_tokens or 0 for record in ok),
        output=sum(record.num_output_tokens for record in ok),
    )
    cached = [record.num_cached_tokens for record in ok if record.num_cached_tokens is not None]
    delays = make_distribution(
        [(record.issued_ns - record.scheduled_ns) / 1e6 for record in records if record.issued_ns]
    )
    return Summary(
        num_requests=len(records),
        num_ok=len(ok),
        num_failed=len(records) - len(ok),
        duration_s=duration_s,
        requests_per_s=_rate(len(ok), duration_s),
        output_tokens_per_s=_rate(totals.output, duration_s),
        total_tokens_per_s=_rate(totals.prompt + totals.output, duration_s),
        num_prompt_tokens=totals.prompt,
        num_output_tokens=totals.output,
        num_cached_tokens=sum(cached) if ok and len(cached) == len(ok) else None,
        ttft_ms=make_distribution([record.ttft_ms for record in ok]),
        tpot_ms=make_distribution([record.tpot_ms for record in ok]),
        issue_delay_p99_ms=None if delays is None else delays.p99,
        errors=_count([record.error or "no answer" for record in records if not record.is_ok]),
        finish_reasons=_count([record.finish_reason or "" for record in ok]),
    )


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _count(names: Sequence[str], most: int = 10) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:most])
