# SPDX-License-Identifier: Apache-2.0
"""What `/metrics` says. Times are observed once a request; gauges are read when asked for.

Counters are plain integers of the frontend's event loop: nothing here runs once a token.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from pelton.core.stats import EngineStats
from pelton.serving.http.latency import RecentLatency
from pelton.serving.worker_pool import WorkerPool
from pelton.serving.worker_roster import WorkerState

_TTFT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.45, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 6.0, 10.0, 30.0, 60.0, 120.0),
)
_TPOT_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1),
    *(0.15, 0.175, 0.2, 0.3, 0.5, 1.0, 2.0),
)
_E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

FamilyT = TypeVar("FamilyT", GaugeMetricFamily, CounterMetricFamily)
Read = Callable[[EngineStats], float]
_ENGINE_GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("pelton_requests_running", "Requests in the batch.", lambda s: s.num_running),
    ("pelton_requests_waiting", "Requests queued in the engine.", lambda s: s.num_waiting),
    ("pelton_kv_blocks", "Usable KV blocks.", lambda s: s.num_blocks),
    ("pelton_kv_blocks_used", "KV blocks held by live requests.", lambda s: s.num_used_blocks),
    (
        "pelton_kv_blocks_cached",
        "Free KV blocks that still hold a prefix.",
        lambda s: s.num_cached_blocks,
    ),
    (
        "pelton_kv_usage_ratio",
        "Share of the KV blocks in use.",
        lambda s: s.num_used_blocks / s.num_blocks if s.num_blocks else 0.0,
    ),
    (
        "pelton_kv_blocks_leased",
        "KV blocks held until other workers have copied them.",
        lambda s: s.num_leased_blocks,
    ),
    (
        "pelton_requests_receiving",
        "Requests in the batch whose prompt another worker computes.",
        lambda s: s.num_receiving,
    ),
    ("pelton_batch_rows", "Rows of the newest step.", lambda s: s.batch_rows),
    ("pelton_batch_tokens", "Tokens of the newest step.", lambda s: s.batch_tokens),
    (
        "pelton_tokens_per_decode",
        "Mean new tokens of a decode row, accepted drafts included.",
        lambda s: s.tokens_per_decode,
    ),
)
_ENGINE_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("pelton_engine_steps", "Steps of this worker.", lambda s: s.steps_total),
    (
        "pelton_worker_prompt_tokens",
        "Prompt tokens that the worker admitted to compute, those found cached included.",
        lambda s: s.prompt_tokens_total,
    ),
    (
        "pelton_worker_cached_tokens",
        "Prompt tokens found in the prefix cache of the worker.",
        lambda s: s.cached_tokens_total,
    ),
    (
        "pelton_worker_generation_tokens",
        "Tokens that the worker generated.",
        lambda s: s.generated_tokens_total,
    ),
    ("pelton_preemptions", "Preemptions in this worker.", lambda s: s.preemptions_total),
    ("pelton_decode_rows", "Decode rows.", lambda s: s.decode_rows_total),
    ("pelton_decode_tokens", "Tokens of decode rows.", lambda s: s.decode_tokens_total),
    ("pelton_prefills", "Prompts computed for other workers.", lambda s: s.prefills_total),
    ("pelton_kv_pulls", "Prompts whose KV came from another worker.", lambda s: s.pulls_total),
    (
        "pelton_kv_pull_copy_seconds",
        "Time in which KV of another worker could be read and was not all here, over all pulls.",
        lambda s: s.pull_copy_s_total,
    ),
    ("pelton_kv_pulled_bytes", "KV bytes from other workers.", lambda s: s.pulled_bytes_total),
    (
        "pelton_kv_pull_fallbacks",
        "Prompts whose KV did not come, and which were computed here.",
        lambda s: s.pull_fallbacks_total,
    ),
)
"""Of each worker, labelled with its number; they start again with its process."""


class Family(msgspec.Struct, array_like=True):
    """Samples of one name, as Prometheus has them."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class _Page:
    """What `generate_latest` needs of a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics:
    """One a frontend. `num_live` is set by its owner and read at scrape time."""

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
        self.recent_ttft = RecentLatency()
        self.recent_tpot = RecentLatency()
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
        self.num_live = 0

    def observe_times(
        self, arrival_s: float, first_s: float | None, last_s: float, num_tokens: int
    ) -> None:
        """Of one request that ended well; `num_tokens` is its longest choice's."""
        self._e2e.observe(last_s - arrival_s)
        if first_s is None:
            return
        self._ttft.observe(first_s - arrival_s)
        self.recent_ttft.add(last_s, first_s - arrival_s)
        if num_tokens > 1:
            tpot_s = (last_s - first_s) / (num_tokens - 1)
            self._tpot.observe(tpot_s)
            self.recent_tpot.add(last_s, tpot_s)

    def render(self, pool: WorkerPool, families: Mapping[int, list[Family] | None] | None) -> bytes:
        """The Prometheus text format. `families`: of each of several frontends, by its number; None
        for one that did not say them."""
        if families is None:
            return generate_latest(_Page(self.families(pool)))
        return generate_latest(_Page([*_label(families), *self._collect_workers(pool)]))

    def families(self, pool: WorkerPool) -> Iterator[Metric]:
        """All that `render` writes for one frontend."""
        yield from self._collect_own(pool)
        yield from self._collect_workers(pool)

    def own_families(self, pool: WorkerPool) -> list[Family]:
        """What this frontend alone knows."""
        return [
            Family(
                m.name, m.documentation, m.type, [(s.name, s.labels, s.value) for s in m.samples]
            )
            for m in self._collect_own(pool)
        ]

    def _collect_own(self, pool: WorkerPool) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield from (
            _gauge("pelton_requests_live", "Requests that are being answered.", self.num_live),
            _counter("pelton_prompt_tokens", "Prompt tokens of requests.", self.prompt_tokens),
            _counter("pelton_cached_tokens", "Prompt tokens found cached.", self.cached_tokens),
            _counter("pelton_generation_tokens", "Tokens generated.", self.generation_tokens),
            _counter("pelton_requests_aborted", "Requests left by clients.", self.num_aborted),
            _counter(
                "pelton_tool_calls_broken",
                "Tool calls of models that did not parse.",
                self.broken_tool_calls,
            ),
            _counter_by(
                "pelton_choices_finished", "Choices by finish reason.", "reason", self.finished
            ),
            _counter_by("pelton_errors", "Error replies and events.", "code", self.errors),
        )
        yield _gauge(
            "pelton_requests_queued", "Requests no worker has room for.", pool.gate.num_waiting
        )
        yield _counter(
            "pelton_cached_tokens_predicted",
            "Prompt tokens that routing expected to be cached; pelton_cached_tokens were.",
            pool.num_predicted_tokens,
        )
        yield _counter(
            "pelton_requests_migrated",
            "Times a request went on elsewhere after its worker was lost.",
            pool.num_migrated,
        )
        numbers, workers = _by_number(pool)
        routed = CounterMetricFamily(
            "pelton_requests_routed", "Requests sent to the worker.", labels=["worker"]
        )
        yield _by_worker(routed, numbers, (worker.num_routed for worker in workers))
        booked = GaugeMetricFamily(
            "pelton_requests_booked",
            "Requests that need the worker, as routing counts them.",
            labels=["worker"],
        )
        yield _by_worker(booked, numbers, map(pool.roster.num_booked, numbers))
        indexed = GaugeMetricFamily(
            "pelton_kv_blocks_indexed",
            "Cached KV blocks of the worker that the router knows of.",
            labels=["worker"],
        )
        yield _by_worker(indexed, numbers, (worker.num_indexed_blocks for worker in workers))

    def _collect_workers(self, pool: WorkerPool) -> Iterator[Metric]:
        """What workers say to every frontend."""
        numbers, workers = _by_number(pool)
        stats = [worker.stats for worker in workers]
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for name, text, read in _ENGINE_GAUGES:
            yield _by_worker(gauge(name, text, labels=["worker"]), numbers, map(read, stats))
        for name, text, read in _ENGINE_COUNTERS:
            yield _by_worker(counter(name, text, labels=["worker"]), numbers, map(read, stats))
        up = gauge("pelton_worker_up", "1 while the worker takes requests.", labels=["worker"])
        yield _by_worker(up, numbers, (worker.is_up for worker in workers))
        info = gauge(
            "pelton_worker_info",
            "1; says the role of a worker that is up.",
            labels=["worker", "role"],
        )
        for number, worker in zip(numbers, workers, strict=True):
            if worker.client is not None and worker.is_up:
                info.add_metric([str(number), worker.client.info.role.value], 1.0)
        yield info
        generation = gauge(
            "pelton_worker_generation", "How many processes it has been.", labels=["worker"]
        )
        yield _by_worker(generation, numbers, (worker.generation for worker in workers))
        yield _by_place(
            "pelton_drafts",
            "Drafts verified, by their place in a row.",
            numbers,
            [s.drafted_total for s in stats],
        )
        yield _by_place(
            "pelton_drafts_accepted",
            "Drafts accepted, by their place in a row.",
            numbers,
            [s.accepted_total for s in stats],
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self._registry)


def _label(families: Mapping[int, list[Family] | None]) -> Iterable[Metric]:
    """One family of each name, whose samples say which frontend they are of."""
    up = GaugeMetricFamily(
        "pelton_frontend_up", "1 if the frontend is in the figures here.", labels=["frontend"]
    )
    by_name: dict[str, Metric] = {}
    for number, members in sorted(families.items()):
        label = {"frontend": str(number)}
        up.add_metric([str(number)], float(members is not None))
        for family in members or ():
            metric = by_name.get(family.name)
            if metric is None:
                metric = by_name[family.name] = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels | label, value)
    return [up, *by_name.values()]


def _by_number(pool: WorkerPool) -> tuple[list[int], list[WorkerState]]:
    states = pool.roster.states
    numbers = sorted(states)
    return numbers, [states[number] for number in numbers]


def _by_worker(family: FamilyT, numbers: list[int], values: Iterable[float]) -> FamilyT:
    for worker, value in zip(numbers, values, strict=True):
        family.add_metric([str(worker)], float(value))
    return family


def _by_place(
    name: str, text: str, numbers: list[int], counts_by_worker: list[tuple[int, ...]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=["worker", "place"])
    for worker, counts in zip(numbers, counts_by_worker, strict=True):
        for place, count in enumerate(counts, 1):
            family.add_metric([str(worker), str(place)], float(count))
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))


def _counter_by(name: str, text: str, label: str, values: Counter[str]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family
