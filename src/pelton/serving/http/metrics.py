# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` says. Times are observed once a request; gauges are read when asked for.

Counters are plain integers of the frontend's event loop: nothing here runs once a token.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from pelton.core.stats import EngineStats

_TTFT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.45, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 6.0, 10.0, 30.0, 60.0, 120.0),
)
_TPOT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1),
    *(0.15, 0.175, 0.2, 0.3, 0.5, 1.0, 2.0),
)
_E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One a frontend. `stats` and `num_live` are set by their owner and read at scrape time."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._ttft = self._histogram(
            "pelton_ttft_seconds", "Arrival of a request to its first token.", _TTFT_BUCKETS_S
        )
        self._tpot = self._histogram(
            "pelton_tpot_seconds",
            "Mean time of an output token after the first, one value a request.",
            _TPOT_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "pelton_e2e_latency_seconds", "Arrival of a request to its last token.", _E2E_BUCKETS_S
        )
        self.finished: Counter[str] = Counter()
        """Choices by finish reason."""
        self.errors: Counter[str] = Counter()
        """Error replies and error events by code."""
        self.num_aborted = 0
        """Requests whose client went away."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.broken_tool_calls = 0
        self.stats = EngineStats()
        self.num_live = 0
        self.worker_generation = 0
        self.is_worker_up = False
        self._registry.register(self)

    def observe_times(
        self, arrival_s: float, first_s: float | None, last_s: float, num_tokens: int
    ) -> None:
        """Of one request that ended well; `num_tokens` is its longest choice's."""
        self._e2e.observe(last_s - arrival_s)
        if first_s is None:
            return
        self._ttft.observe(first_s - arrival_s)
        if num_tokens > 1:
            self._tpot.observe((last_s - first_s) / (num_tokens - 1))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        stats = self.stats
        used = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        yield from (
            _gauge("pelton_requests_live", "Requests this frontend answers now.", self.num_live),
            _gauge("pelton_requests_running", "Requests in the batch.", stats.num_running),
            _gauge("pelton_requests_waiting", "Requests queued in the engine.", stats.num_waiting),
            _gauge("pelton_kv_blocks", "Usable KV blocks.", stats.num_blocks),
            _gauge(
                "pelton_kv_blocks_used", "KV blocks held by live requests.", stats.num_used_blocks
            ),
            _gauge(
                "pelton_kv_blocks_cached",
                "Free KV blocks that still hold a prefix.",
                stats.num_cached_blocks,
            ),
            _gauge("pelton_kv_usage_ratio", "Share of the KV blocks in use.", used),
            _gauge("pelton_batch_rows", "Rows of the newest step.", stats.batch_rows),
            _gauge("pelton_batch_tokens", "Tokens of the newest step.", stats.batch_tokens),
            _gauge("pelton_worker_up", "1 while a worker takes requests.", self.is_worker_up),
            _gauge(
                "pelton_worker_generation",
                "How many workers there have been.",
                self.worker_generation,
            ),
            _counter("pelton_prompt_tokens", "Prompt tokens of requests.", self.prompt_tokens),
            _counter("pelton_cached_tokens", "Prompt tokens found cached.", self.cached_tokens),
            _counter("pelton_generation_tokens", "Tokens generated.", self.generation_tokens),
            _counter("pelton_requests_aborted", "Requests left by clients.", self.num_aborted),
            _counter(
                "pelton_tool_calls_broken",
                "Tool calls of models that did not parse.",
                self.broken_tool_calls,
            ),
            _counter("pelton_engine_steps", "Steps of this worker.", stats.steps_total),
            _counter("pelton_preemptions", "Preemptions in this worker.", stats.preemptions_total),
            _counter("pelton_decode_rows", "Rows that went on.", stats.decode_rows_total),
            _gauge(
                "pelton_tokens_per_decode",
                "Mean new tokens of a decode row, accepted drafts included.",
                stats.tokens_per_decode,
            ),
            _counter_by(
                "pelton_drafts", "Drafts by place.", "place", _by_place(stats.drafted_total)
            ),
            _counter_by(
                "pelton_drafts_accepted",
                "Accepted drafts by place.",
                "place",
                _by_place(stats.accepted_total),
            ),
            _counter_by("pelton_choices_finished", "Choices by reason.", "reason", self.finished),
            _counter_by("pelton_errors", "Errors by code.", "code", self.errors),
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


def _by_place(counts: tuple[int, ...]) -> Counter[str]:
    return Counter({str(place): count for place, count in enumerate(counts, 1)})


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))


def _counter_by(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
