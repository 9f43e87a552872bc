# SPDX-License-Identifier: Apache-2.0
"""Reads the engine's statistics back from a server's `/metrics` page."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pelton.core.stats import EngineStats

_PLACES: Mapping[str, str] = {
    "pelton_drafts_total": "drafted_total",
    "pelton_drafts_accepted_total": "accepted_total",
}
"""Metric with a label `place`, counted from 1, to the field of `EngineStats` it fills."""
_GAUGES: Mapping[str, str] = {
    "pelton_requests_running": "num_running",
    "pelton_requests_waiting": "num_waiting",
    "pelton_kv_blocks": "num_blocks",
    "pelton_kv_blocks_used": "num_used_blocks",
    "pelton_batch_rows": "batch_rows",
    "pelton_decode_rows_total": "decode_rows_total",
    "pelton_decode_tokens_total": "decode_tokens_total",
}
"""Metric to the field of `EngineStats` that it is the sum of over workers."""


def read_engine_stats(text: str) -> EngineStats | None:
    """None when the page is not one of Pelton's."""
    values: dict[str, float] = {}
    places: dict[str, Counter[int]] = {field: Counter() for field in _PLACES.values()}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                field = _GAUGES.get(sample.name)
                if field is not None:
                    values[field] = values.get(field, 0.0) + sample.value
                elif sample.name in _PLACES:
                    places[_PLACES[sample.name]][int(sample.labels["place"])] += int(sample.value)
    except (ValueError, KeyError):
        return None
    if not values:
        return None
    fields: dict[str, Any] = {field: int(value) for field, value in values.items()}
    for field, counts in places.items():
        fields[field] = tuple(counts[place] for place in range(1, max(counts, default=0) + 1))
    return EngineStats(**fields)
