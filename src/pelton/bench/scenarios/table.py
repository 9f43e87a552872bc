# SPDX-License-Identifier: Apache-2.0
"""The scenarios by name."""

from collections.abc import Mapping

from pelton.bench.config import BenchConfig, ScenarioName
from pelton.bench.scenarios.interactive import INTERACTIVE
from pelton.bench.scenarios.offline import OFFLINE
from pelton.bench.scenarios.policy import Limits, Scenario
from pelton.bench.scenarios.server import SERVER
from pelton.bench.scenarios.single_stream import SINGLE_STREAM
from pelton.core.config import Auto
from pelton.core.errors import ConfigError

SCENARIOS: Mapping[ScenarioName, Scenario] = {
    ScenarioName.OFFLINE: OFFLINE,
    ScenarioName.SERVER: SERVER,
    ScenarioName.INTERACTIVE: INTERACTIVE,
    ScenarioName.SINGLE_STREAM: SINGLE_STREAM,
}

_DEFAULT_DURATION_S = 60.0


def resolve_limits(config: BenchConfig) -> Limits:
    """The scenario's limits with those of the user in their place; a limit or rate that the
    scenario does not have is a `ConfigError`."""
    defaults = SCENARIOS[config.scenario].default_limits
    if not defaults.are_any:
        for option, value in (
            ("--ttft-ms", config.ttft_ms), ("--tpot-ms", config.tpot_ms), ("--qps", config.qps),
        ):  # fmt: skip
            if not isinstance(value, Auto):
                raise ConfigError(
                    f"{option} does not apply to {config.scenario}: only server and interactive "
                    "have an arrival rate and latency limits.", param=option,
                )  # fmt: skip
        return defaults
    return Limits(
        ttft_ms=defaults.ttft_ms if isinstance(config.ttft_ms, Auto) else config.ttft_ms,
        tpot_ms=defaults.tpot_ms if isinstance(config.tpot_ms, Auto) else config.tpot_ms,
    )


def resolve_min_duration_s(config: BenchConfig) -> float:
    if not isinstance(config.min_duration, Auto):
        return config.min_duration
    return _DEFAULT_DURATION_S if isinstance(config.requests, Auto) else 0.0
