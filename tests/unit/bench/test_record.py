# SPDX-License-Identifier: Apache-2.0
"""Records and reports of measurements made up here: complete, whole on disk, self-contained."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from pelton.bench.assemble import Measurement, make_record
from pelton.bench.config import BenchConfig, ScenarioName
from pelton.bench.engine_metrics import read_engine_stats
from pelton.bench.loadgen_log import LoadGenPercentiles, LoadGenResult
from pelton.bench.machine import describe_command, describe_machine
from pelton.bench.measurements import BUCKET_NS, RequestRecord
from pelton.bench.record import (
    Drafting,
    Record,
    Status,
    TargetInfo,
    read_record,
    write_atomically,
    write_record,
    write_requests,
)
from pelton.bench.report import write_report
from pelton.bench.scenarios.policy import Limits
from pelton.bench.traffic import load_data_set, make_synthetic
from pelton.core.config import CacheConfig, EngineConfig
from pelton.core.stats import EngineStats

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000


def make_requests(num: int = 40) -> list[RequestRecord]:
    return [
        RequestRecord(
            request_id=f"r{i}", sample_index=i, finish_reason="length", num_prompt_tokens=9,
            scheduled_ns=START_NS + i * 100 * MS, issued_ns=START_NS + i * 100 * MS,
            first_token_ns=START_NS + (i * 100 + 60 + i) * MS,
            last_token_ns=START_NS + (i * 100 + 160 + i) * MS,
            num_output_tokens=11, num_cached_tokens=0,
        )
        for i in range(num)
    ]  # fmt: skip


def make_measurement() -> Measurement:
    engine = EngineConfig(cache=CacheConfig(prefix_cache=False))
    percentiles = LoadGenPercentiles(p50=80.0, p90=96.0, p99=99.0)
    return Measurement(
        bench=BenchConfig(scenario=ScenarioName.SERVER, qps=10.0),
        engine=engine,
        limits=Limits(ttft_ms=2000, tpot_ms=100),
        target_info=TargetInfo(
            kind="engine", model="smollm2", url=None, max_model_len=8192,
            config={"cache": {"num_blocks": 100}}, config_hash="abc",
        ),
        data_set=load_data_set("prompts"),
        loadgen=LoadGenResult(
            is_valid=True, reasons=[], version="6.0.17", num_errors=0, samples_per_s=10.0,
            tokens_per_s=110.0, ttft_ms=percentiles, tpot_ms=percentiles, parameters={},
        ),
        records=make_requests(),
        tokens_by_bucket={START_NS // BUCKET_NS + i: 11 for i in range(40)},
        stats=[
            (START_NS + i * 250 * MS, EngineStats(num_running=i, num_blocks=100, num_used_blocks=i))
            for i in range(-4, 16)
        ],
    )  # fmt: skip


def test_a_good_measurement_makes_a_valid_record() -> None:
    record = make_record(make_measurement())

    assert record.verdict.is_valid
    assert record.status is Status.COMPLETE
    assert record.verdict.binding_limit == "tpot"
    assert record.summary.num_ok == 40
    assert record.data_set.sha256 == load_data_set("prompts").sha256
    assert record.machine.num_threads >= 1
    assert record.versions["mlcommons-loadgen"]
    assert re.fullmatch(r"smollm2_.+_server_\d{4}-\d\d-\d\d", record.name)


def test_the_timeline_starts_at_the_first_scheduled_request() -> None:
    timeline = make_record(make_measurement()).timeline

    assert len(timeline.output_tokens) == 40
    assert [point.time_s for point in timeline.engine[:3]] == [0.0, 0.25, 0.5]
    assert timeline.engine[3].kv_use == 0.03


def test_the_configuration_hash_follows_both_configurations() -> None:
    measurement = make_measurement()
    first = make_record(measurement).config_hash
    assert measurement.target_info is not None

    measurement.bench = BenchConfig(scenario=ScenarioName.SERVER, qps=11.0)
    other_load = make_record(measurement).config_hash
    measurement.target_info = msgspec.structs.replace(measurement.target_info, config={})
    other_engine = make_record(measurement).config_hash

    assert len({first, other_load, other_engine}) == 3


def test_synthetic_data_is_called_synthetic_with_its_seed() -> None:
    measurement = make_measurement()
    measurement.data_set = make_synthetic(input_len=8, output_len=4, seed=5, vocab_size=None)

    data_set = make_record(measurement).data_set
    assert (data_set.is_synthetic, data_set.seed) == (True, 5)


def test_an_interrupted_run_is_marked_and_invalid() -> None:
    measurement = make_measurement()
    measurement.is_interrupted = True
    record = make_record(measurement)

    assert record.status is Status.INTERRUPTED
    assert record.verdict.reasons == ["The run ended early: interrupted by the user"]


def test_a_run_that_never_reached_its_target_still_makes_a_record(tmp_path: Path) -> None:
    measurement = Measurement(
        bench=BenchConfig(), engine=EngineConfig(), limits=Limits(), aborted="the worker died"
    )
    record = make_record(measurement)
    write_report(record, [], tmp_path / "report.html", tmp_path / "report.png")

    assert not record.verdict.is_valid
    assert record.status is Status.ENDED_EARLY
    assert "the worker died" in (tmp_path / "report.html").read_text()


def test_an_api_key_reaches_neither_configuration_nor_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/pelton", "bench", "--api-key", "s3cret", "--out", "a b"])
    measurement = make_measurement()
    measurement.bench = replace(measurement.bench, api_key="s3cret")
    text = msgspec.json.encode(make_record(measurement)).decode()

    assert "s3cret" not in text
    assert describe_command("s3cret") == "pelton bench --api-key (set) --out 'a b'"


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record = make_record(make_measurement())

    path = write_record(record, tmp_path)
    write_requests(make_requests(), tmp_path)

    assert read_record(path) == record
    assert len((tmp_path / "requests.jsonl").read_bytes().splitlines()) == 40
    assert set(msgspec.json.decode(path.read_bytes())) == set(Record.__struct_fields__)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


class PageReader(HTMLParser):
    """Collects what a browser would fetch, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action") and value
        ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    measurement = make_measurement()
    write_report(
        make_record(measurement), measurement.records, folder / "report.html", folder / "p.png"
    )
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    return (folder / "report.html").read_text()


def test_the_report_fetches_nothing(page: str) -> None:
    reader = PageReader()
    reader.feed(page)

    assert reader.tags.count("svg") == 4
    assert all(reference.startswith("#") for reference in reader.references)
    assert not {"link", "script", "img", "iframe"} & set(reader.tags)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert "://" not in page


def test_the_reports_references_and_ids_are_unambiguous(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    used = re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", page)

    assert len(ids) == len(set(ids))
    assert set(used) <= set(ids)


@pytest.mark.parametrize(
    "text",
    [
        "VALID", "smollm2", "limit 2000 ms", "limit 100 ms, the one that binds", "prompts",
        "not allowed, 0 prompt tokens reused", "LoadGen&#39;s p99", "TTFT", "TPOT",
        "not verified by MLCommons", "Output tokens/s over time",
    ],
)  # fmt: skip
def test_the_report_says_what_matters(page: str, text: str) -> None:
    assert text in page.replace("LoadGen's", "LoadGen&#39;s")


def drafted_stats(rows: int, drafted: tuple[int, ...], accepted: tuple[int, ...]) -> EngineStats:
    return EngineStats(
        decode_rows_total=rows,
        decode_tokens_total=rows + sum(accepted),
        drafted_total=drafted,
        accepted_total=accepted,
    )


def test_drafting_of_the_test_alone_is_recorded_and_shown(tmp_path: Path) -> None:
    measurement = make_measurement()
    measurement.stats = [
        (START_NS - 10 * MS, drafted_stats(50, (40, 40), (40, 40))),
        (START_NS + 10 * MS, drafted_stats(60, (50, 48), (45, 41))),
        (START_NS + 20 * MS, drafted_stats(150, (140, 120), (90, 60))),
    ]
    record = make_record(measurement)

    assert record.drafting == Drafting(tokens_per_decode=1.7, drafted=[100, 80], accepted=[50, 20])
    write_report(record, measurement.records, tmp_path / "r.html", tmp_path / "r.png")
    page = (tmp_path / "r.html").read_text()
    for text in (
        "50.0% of 100, 25.0% of 80",
        "1.70 for each request",
        "Drafts accepted by place: place 1: 50%, place 2: 25%",
        "1.70 tokens a step",
    ):
        assert text in page
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_without_drafts_nothing_is_said_of_them(page: str) -> None:
    assert "rafts accepted" not in page
    assert make_record(make_measurement()).drafting is None


def test_text_from_outside_cannot_become_markup(tmp_path: Path) -> None:
    measurement = make_measurement()
    assert measurement.target_info is not None
    measurement.target_info = msgspec.structs.replace(
        measurement.target_info, model="<script>alert(1)</script>"
    )
    write_report(
        make_record(measurement), measurement.records, tmp_path / "r.html", tmp_path / "r.png"
    )

    assert "<script>" not in (tmp_path / "r.html").read_text()


def test_engine_statistics_come_back_from_a_metrics_page() -> None:
    text = (
        "# TYPE pelton_requests_running gauge\npelton_requests_running 3.0\n"
        "pelton_kv_blocks 100.0\npelton_kv_blocks_used 25.0\nother_metric 7\n"
        'pelton_drafts_total{place="1"} 9.0\npelton_drafts_total{place="2"} 8.0\n'
        'pelton_drafts_accepted_total{place="1"} 5.0\npelton_decode_rows_total 10.0\n'
        "pelton_decode_tokens_total 14.0\n"
    )

    assert read_engine_stats(text) == EngineStats(
        num_running=3,
        num_blocks=100,
        num_used_blocks=25,
        decode_rows_total=10,
        decode_tokens_total=14,
        drafted_total=(9, 8),
        accepted_total=(5,),
    )


@pytest.mark.parametrize("text", ["", "other_metric 7\n", "<html>not found</html>"])
def test_a_page_of_another_server_gives_no_statistics(text: str) -> None:
    assert read_engine_stats(text) is None


def test_the_machine_is_described() -> None:
    machine = describe_machine()

    assert machine.cpu
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28
