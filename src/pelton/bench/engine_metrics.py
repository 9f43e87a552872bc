# SPDX-License-Identifier: Apache-2.0
"""Reads the engine's statistics back from a server's `/metrics` page."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pelton.core.stats import EngineStats

_GAUGES: Mapping[str, str] = {
    "pelton_requests_running": "num_running",
    "pelton_requests_waiting": "num_waiting",
    "pelton_kv_blocks": "num_blocks",
    "pelton_kv_blocks_used": "num_used_blocks",
    "pelton_batch_rows": "batch_rows",
}
"""Metric to the field of `EngineStats` that it is the sum of over workers."""


def read_engine_stats(text: str) -> EngineStats | None:
    """None when the page is not one of Pelton's."""
    values: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                field = _GAUGES.get(sample.name)
                if field is not None:
                    values[field] = values.get(field, 0.0) + sample.value
    except ValueError:
        return None
    if not values:
        return None
    fields: dict[str, Any] = {field: int(value) for field, value in values.items()}
    return EngineStats(**fields)
