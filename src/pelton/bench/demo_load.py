# SPDX-License-Identifier: Apache-2.0
"""Chooses a load that any machine holds and that is measured within minutes.

LoadGen needs some five hundred requests before it trusts a p99, so a slow machine gets shorter
answers rather than a longer run. One that is too slow for the limits gets wider ones: a smaller
load would not make its steps faster.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pelton.bench.config import BenchConfig
from pelton.bench.load_client import LoadClient, launch_load_process
from pelton.bench.load_messages import RunClosedLoop, Setup
from pelton.bench.scenarios.calibration import CalibrationError, Level, measure_level
from pelton.bench.scenarios.policy import num_queries_for
from pelton.bench.scenarios.table import resolve_limits
from pelton.bench.target import find_server
from pelton.bench.traffic import load_data_set

DATA_SET = "prompts"
# Limits of the server scenario for Llama-2-70B in MLPerf Inference v6.0: five tokens a second is
# as fast as people read, and what a CPU can hold.
TTFT_MS, TPOT_MS = 2000.0, 200.0
_OUTPUT_LENS = (32, 16, 8)
"""Not shorter: over a few tokens one step with a long prompt in it decides the mean."""
_CONCURRENCY = 8
_PROBE_REQUESTS = 32
_PROBE_TIME_S = 6.0
_LOAD_FRACTION = 0.5
_MAX_WIDENING = 64
_RUN_TIME_S = 100.0
_SPARE_REQUESTS = 21
"""Beyond the fewest that could do, for the run not to end on the edge."""


@dataclass(frozen=True, slots=True)
class DemoLoad:
    qps: float
    output_len: int
    num_requests: int
    widening: int
    """What the limits are multiplied by: 1, or on a slow machine a power of two."""

    @property
    def ttft_ms(self) -> float:
        return TTFT_MS * self.widening

    @property
    def tpot_ms(self) -> float:
        return TPOT_MS * self.widening

    @property
    def duration_s(self) -> float:
        return self.num_requests / self.qps


async def choose_load(url: str, model: str) -> DemoLoad:
    """Half of what the server at `url` does with eight requests in flight, at the longest answers
    for which the run is short enough, under limits that it holds then. A request that fails is a
    `CalibrationError`."""
    config = BenchConfig(url=url, ttft_ms=TTFT_MS, tpot_ms=TPOT_MS)
    min_requests = num_queries_for(0.99, 0) + _SPARE_REQUESTS
    load = DemoLoad(qps=0.0, output_len=0, num_requests=0, widening=1)
    async with find_server(config, model) as target:
        for output_len in _OUTPUT_LENS:
            samples = load_data_set(DATA_SET, output_len=output_len).samples
            with tempfile.TemporaryDirectory(prefix="pelton-demo-") as temporary:
                path = Path(temporary) / "samples.json"
                path.write_bytes(msgspec.json.encode(target.prepare(samples)))
                setup = Setup(
                    target=target.address,
                    samples_path=str(path),
                    may_reuse_prefixes=False,
                    request_timeout_s=config.request_timeout,
                )
                async with launch_load_process(setup) as client:
                    level = await _probe(client, config)
            qps = _LOAD_FRACTION * level.requests_per_s
            enough = num_queries_for(0.99, 1)
            num_requests = min(enough, max(min_requests, int(qps * _RUN_TIME_S)))
            load = DemoLoad(qps, output_len, num_requests, choose_widening(level))
            if load.duration_s <= _RUN_TIME_S:
                break
    return load


def choose_widening(level: Level) -> int:
    """The least power of two with which what was measured is within the limits (p90)."""
    widening = 1
    while level.ttft_p90_ms > TTFT_MS * widening or level.tpot_p90_ms > TPOT_MS * widening:
        widening *= 2
        if widening > _MAX_WIDENING:
            raise CalibrationError(
                f"The first token took {level.ttft_p90_ms:,.0f} ms and each other"
                f" {level.tpot_p90_ms:,.0f} ms (p90): too slow for the demo;"
                " try it with nothing beside it, on more cores, or with --device cuda."
            )
    return widening


async def _probe(client: LoadClient, config: BenchConfig) -> Level:
    warm_up = RunClosedLoop(
        concurrency=_CONCURRENCY, num_requests=_CONCURRENCY, time_limit_s=_PROBE_TIME_S
    )
    await client.run_closed_loop(warm_up)
    records = await client.run_closed_loop(
        RunClosedLoop(
            concurrency=_CONCURRENCY, num_requests=_PROBE_REQUESTS, time_limit_s=_PROBE_TIME_S
        )
    )
    if not records:
        raise CalibrationError("The server answered no request of the calibration.")
    return measure_level(_CONCURRENCY, records, resolve_limits(config))
