# SPDX-License-Identifier: Apache-2.0
"""What a measurement is told: the node behind the options of `pelton bench`."""

from dataclasses import dataclass
from enum import StrEnum

from pelton.core.config import AUTO, Auto, Node, setting
from pelton.core.errors import ConfigError


class ScenarioName(StrEnum):
    OFFLINE = "offline"
    SERVER = "server"
    INTERACTIVE = "interactive"
    SINGLE_STREAM = "single-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(Node):
    scenario: ScenarioName = setting(
        ScenarioName.SERVER, "How load arrives, and which latencies are limited."
    )
    url: str = setting("", "Server to measure, such as http://127.0.0.1:8000; empty: an engine.")
    api_key: str = setting("", "Bearer token for --url; empty: none.")
    out: str = setting("pelton-report", "Folder for the record, the report and LoadGen's logs.")
    qps: float | Auto = setting(
        AUTO, "Requests a second (server, interactive); auto: part of a calibrated capacity.",
        low=1e-3,
    )  # fmt: skip
    dataset: str = setting(
        "bundled",
        "'bundled' (prompts and passages), 'prompts', 'passages', or a .jsonl file whose rows hold "
        "prompt, messages or input_tokens, and optionally max_tokens.",
    )
    input_len: int = setting(0, "Synthetic prompts of this many random tokens; 0: none.", low=0)
    output_len: int = setting(
        0, "Output tokens: exactly (synthetic) or at most (data set); 0: what the data set says.",
        low=0,
    )  # fmt: skip
    ttft_ms: float | Auto = setting(
        AUTO, "Limit of the p99 time to first token; auto: the scenario's.", low=1e-3
    )
    tpot_ms: float | Auto = setting(
        AUTO, "Limit of the p99 time per output token; auto: the scenario's.", low=1e-3
    )
    min_duration: float | Auto = setting(
        AUTO, "Seconds a run lasts at least; auto: 60, or 0 with --requests.", low=0
    )
    requests: int | Auto = setting(
        AUTO, "Requests at least; auto: what the percentiles and --min-duration need.", low=1
    )
    warmup_requests: int = setting(8, "Requests before the test that are not counted.", low=0)
    max_in_flight: int = setting(
        1000, "Requests sent at once in the offline scenario; the rest wait here.", low=1
    )
    request_timeout: float = setting(600.0, "Seconds after which a request has failed.", low=0.01)

    def __post_init__(self) -> None:
        # Not super(): a slots dataclass is a copy of the class that the zero-argument form means.
        Node.__post_init__(self)
        if self.input_len and self.output_len < 2:
            raise ConfigError(
                "--input-len needs --output-len of at least 2: time per output token is undefined "
                "for one token.", param="output_len",
            )  # fmt: skip
        if self.output_len == 1:
            raise ConfigError(
                "--output-len must be at least 2: time per output token is undefined for one "
                "token.", param="output_len",
            )  # fmt: skip
        if self.input_len and self.dataset != "bundled":
            raise ConfigError(
                "--input-len makes synthetic prompts and cannot be combined with --dataset.",
                param="dataset",
            )
