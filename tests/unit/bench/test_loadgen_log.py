# SPDX-License-Identifier: Apache-2.0
"""Reading LoadGen's logs: written here by hand in its shape, with the keys of release 6.0.17."""

import json
from pathlib import Path

import pytest

from pelton.bench.loadgen_log import apply_schedule, read_result
from pelton.bench.measurements import RequestRecord

VALID = {
    "loadgen_version": "6.0.17 @ d6147c7eb7",
    "effective_min_query_count": 662,
    "result_validity": "VALID",
    "result_min_duration_met": True,
    "result_min_queries_met": True,
    "result_perf_constraints_met": True,
    "early_stopping_met": True,
    "result_query_count": 662,
    "result_completed_samples_per_sec": 9.5,
    "result_completed_tokens_per_second": 104.5,
    "result_first_token_50.00_percentile_latency_ns": 42_000_000,
    "result_first_token_90.00_percentile_latency_ns": 142_000_000,
    "result_first_token_99.00_percentile_latency_ns": 187_500_000,
    "result_time_per_output_token_50.00_percentile_ns": 5_000_000,
    "result_time_per_output_token_90.00_percentile_ns": 5_100_000,
    "result_time_per_output_token_99.00_percentile_ns": 5_200_000,
    "num_errors": 0,
}


def write_detail(folder: Path, values: dict[str, object], errors: tuple[str, ...] = ()) -> None:
    lines = [(key, value, False) for key, value in values.items()]
    lines += [("error_runtime", text, True) for text in errors]
    text = "".join(
        ":::MLLOG "
        + json.dumps({"key": key, "value": value, "metadata": {"is_error": is_error}})
        + "\n"
        for key, value, is_error in lines
    )
    (folder / "mlperf_log_detail.txt").write_text(text)


def test_a_valid_run_gives_its_figures(tmp_path: Path) -> None:
    write_detail(tmp_path, VALID)
    result = read_result(tmp_path)

    assert result.is_valid
    assert result.reasons == []
    assert (result.samples_per_s, result.tokens_per_s) == (9.5, 104.5)
    assert result.ttft_ms is not None
    assert result.tpot_ms is not None
    assert (result.ttft_ms.p99, result.tpot_ms.p50) == (187.5, 5.0)
    assert result.parameters == {"min_query_count": 662}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"result_min_duration_met": False}, "shorter than the minimum duration"),
        ({"result_min_queries_met": False}, "Fewer requests than the minimum"),
        (
            {
                "result_perf_constraints_met": False,
                "result_invalid_reason": "TTFT constrain not met: Reduce target QPS",
            },
            "TTFT constrain not met",
        ),
        (
            {
                "early_stopping_met": False,
                "result_query_count": 21,
                "early_stopping_tpot_result": " * Run unsuccessful.  * Processed 21 queries.  "
                "* Would need to run at least 438 more queries,  with the run",
            },
            "21 were issued, at least 438 more",
        ),
        (
            {
                "early_stopping_met": False,
                "result_query_count": 30,
                "early_stopping_tpot_result": " * Only processed 30 queries.  * Need to process "
                "at least 64 queries for early stopping.",
            },
            "p90: 30 were issued, at least 64",
        ),
    ],
)
def test_each_reason_becomes_a_sentence(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    write_detail(tmp_path, VALID | {"result_validity": "INVALID"} | changes)
    result = read_result(tmp_path)

    assert not result.is_valid
    assert len(result.reasons) == 1
    assert words in result.reasons[0]


def test_loadgens_errors_are_reasons_once_each(tmp_path: Path) -> None:
    values = VALID | {"result_validity": "INVALID", "num_errors": 2}
    write_detail(tmp_path, values, errors=("n_tokens is 1", "n_tokens is 1"))

    assert read_result(tmp_path).reasons == ["LoadGen error: n_tokens is 1"]


@pytest.mark.parametrize("content", [None, "", ':::MLLOG {"key": "loadgen_ver'])
def test_a_run_that_did_not_end_is_invalid(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "mlperf_log_detail.txt").write_text(content)
    result = read_result(tmp_path)

    assert not result.is_valid
    assert result.reasons == ["LoadGen did not end its test."]


def test_the_schedule_comes_from_the_trace(tmp_path: Path) -> None:
    """Query 1 was issued 0.14 ms late; our callback saw query 0 after 10 us, query 1 after 500."""
    trace = tmp_path / "mlperf_log_trace.json"
    sample = (
        '{{"name":"Sample","cat":"default","ph":"b","pid":1,"id":{0},"ts":{1},"args":'
        '{{"sample_seq":{0},"query_seq":{0},"sample_idx":3,"issue_start_ns":{2},"complete_ns":9}}}},\n'
    )
    trace.write_text(
        '{"traceEvents":[\n{"name":"LogDetail","args":{"key":""broken""}},\n'
        + sample.format(0, "265.000", 0)
        + sample.format(1, "1265.000", 140_000)
    )
    start_ns = 1_000_000_000_000
    issued = [start_ns + 265_000 + 10_000, start_ns + 1_265_000 + 140_000 + 500_000, 7]
    records = [
        RequestRecord(request_id=str(i), sample_index=0, scheduled_ns=ns, issued_ns=ns)
        for i, ns in enumerate(issued)
    ]

    apply_schedule(tmp_path, records)

    assert records[0].scheduled_ns == start_ns + 275_000
    assert records[1].scheduled_ns - records[0].scheduled_ns == 1_000_000
    assert records[2].scheduled_ns == 7
    assert not trace.exists()
