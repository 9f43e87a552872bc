# SPDX-License-Identifier: Apache-2.0
"""Traces as a collector gets them: their parts, whom they belong to, what they cost otherwise."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from in_memory import InMemoryTransport, Server, running_server

from pelton.core.config import EngineConfig, ModelConfig, Role, SchedulerConfig
from pelton.core.errors import ConfigError
from pelton.core.request import GenerateRequest, SamplingParams
from pelton.core.trace import Phase
from pelton.engine.engine import Engine
from pelton.serving.router.types import Policy, RouterConfig
from pelton.serving.stand_in import make_scheduled_stand_in, parse_stand_in
from pelton.serving.tracing import RequestTrace, Tracing, start_tracing
from pelton.serving.worker_client import WorkerClient
from pelton.serving.worker_pool import WorkerPool
from trace_collector import Collector, running_collector

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello there."}], "max_tokens": 5}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_scheduled_engine(**scheduler: int) -> Engine:
    model = "stand-in:none?scheduled=1"
    config = EngineConfig(model=ModelConfig(model=model), scheduler=SchedulerConfig(**scheduler))
    return make_scheduled_stand_in(config, parse_stand_in(model))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@asynccontextmanager
async def traced_server(collector: Collector) -> AsyncIterator[Server]:
    engine = make_scheduled_engine()
    async with running_server(engine=engine, otlp_endpoint=collector.url) as server:  # type: ignore[arg-type]
        yield server
        await send_spans(server)


async def send_spans(server: Server) -> None:
    assert server.frontend.tracing is not None
    await server.frontend.tracing.close()


async def test_a_request_is_one_trace_of_its_parts(collector: Collector) -> None:
    async with traced_server(collector) as server:
        reply = await server.post(CHAT, BODY)
    [root] = collector.named(f"POST {CHAT}")
    order = ["tokenise", "admission", "route", "worker", "queue", "prefill", "decode"]
    parts = [collector.named(name) for name in order]

    assert collector.paths == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "pelton"
    assert [len(found) for found in parts] == [1] * len(order)
    assert len(collector.spans) == len(order) + 1
    assert {(part.trace_id, part.parent_id) for [part] in parts} == {(root.trace_id, root.span_id)}
    starts = [part.start_ns for [part] in parts]
    assert starts == sorted(starts)
    assert root.start_ns <= starts[0]
    assert max(part.end_ns for [part] in parts) <= root.end_ns
    for [before], [after] in pairwise(parts[-3:]):
        assert before.end_ns <= after.start_ns  # a phase of the engine follows the one before
    [[route]] = [parts[2]]
    assert route.attributes["pelton.worker.id"] == "0"
    assert route.attributes["pelton.route.policy"] == "kv-aware"
    assert route.attributes["pelton.route.scores"].startswith("0:")
    assert root.attributes["gen_ai.response.id"] == reply.json["id"]


async def test_the_attributes_are_those_of_genai(collector: Collector) -> None:
    async with traced_server(collector) as server:
        reply = await server.post(
            CHAT, {**BODY, "temperature": 0.5, "seed": 7, "stop": ["\0"], "stream": True}
        )
    [root] = collector.named(f"POST {CHAT}")
    time_to_first = root.attributes.pop("gen_ai.response.time_to_first_chunk")

    assert 0 < time_to_first < 30
    assert root.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pelton",
        "gen_ai.request.model": "stand-in",
        "gen_ai.request.stream": True,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["\0"],
        "gen_ai.response.id": reply.events[0]["id"],
        "gen_ai.response.model": "stand-in",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": root.attributes["gen_ai.usage.input_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "pelton.request_id": reply.headers["x-request-id"],
    }
    assert root.attributes["gen_ai.usage.input_tokens"] > 3


@pytest.mark.parametrize(("flags", "num_traces"), [("01", 1), ("00", 0)])
async def test_the_clients_trace_goes_on(collector: Collector, flags: str, num_traces: int) -> None:
    """With its id where the client records it; where it does not, nothing is recorded here."""
    traceparent = PARENT[:-2] + flags
    async with traced_server(collector) as server:
        await server.post(CHAT, BODY, headers={"traceparent": traceparent})
    roots = collector.named(f"POST {CHAT}")

    assert len(roots) == num_traces
    for root in roots:
        assert f"00-{root.trace_id}-{root.parent_id}-01" == PARENT


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": ""},
        {"traceparent": "00-" + 10_000 * "a"},
        {"traceparent": PARENT + 10_000 * "\xff"},
        {"traceparent": PARENT.replace("0af7", "zzzz")},
        {"traceparent": f"00-{32 * '0'}-{16 * '0'}-01"},
        {"traceparent": PARENT.replace("00-", "ff-", 1)},
        {"traceparent": PARENT, "tracestate": 5000 * "=,"},
        {"traceparent": PARENT, "tracestate": "a=1,a=2," + 10_000 * "x"},
    ],
)
async def test_a_trace_context_that_is_none_costs_no_reply(
    collector: Collector, headers: dict[str, str]
) -> None:
    async with traced_server(collector) as server:
        reply = await server.post(CHAT, BODY, headers=headers)
    [root] = collector.named(f"POST {CHAT}")
    assert reply.status == 200
    assert len(root.trace_id) == 32


async def test_each_prompt_of_a_reply_has_its_parts(collector: Collector) -> None:
    prompts = [[400, 401], [500, 501, 502]]
    async with traced_server(collector) as server:
        reply = await server.post("/v1/completions", {"prompt": prompts, "max_tokens": 3, "n": 2})
    [root] = collector.named("POST /v1/completions")

    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.response.id"] == reply.json["id"]
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    ids = [f"{reply.json['id']}-{number}" for number in range(2)]
    for name in ("admission", "route", "worker"):
        assert [s.attributes["gen_ai.response.id"] for s in collector.named(name)] == ids
    for name in ("queue", "prefill", "decode"):
        found = [
            (span.attributes["gen_ai.response.id"], span.attributes["pelton.choice.index"])
            for span in collector.named(name)
        ]
        assert sorted(found) == [(i, index) for i in ids for index in range(2)]


async def test_an_error_of_the_client_is_named_and_is_none_of_the_server(
    collector: Collector,
) -> None:
    async with traced_server(collector) as server:
        await server.post(CHAT, {**BODY, "temperature": -1})
    [root] = collector.spans

    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] == "invalid_request_error"
    assert not root.is_error


async def test_a_client_that_leaves_ends_its_trace(collector: Collector) -> None:
    async with traced_server(collector) as server:
        body = {**BODY, "max_tokens": 4000, "stream": True}
        await server.post(CHAT, body, leave_after_chunks=3)
    [decode] = collector.named("decode")
    [worker] = collector.named("worker")

    assert decode.end_ns == worker.end_ns


async def test_a_choice_that_is_cut_short_has_decoded_until_then(collector: Collector) -> None:
    async with traced_server(collector) as server:
        body = {"prompt": "a", "max_tokens": 4000, "n": 2, "stream": True}
        await server.post("/v1/completions", body, leave_after_chunks=5)
    [worker] = collector.named("worker")

    ends = {s.attributes["pelton.choice.index"]: s.end_ns for s in collector.named("decode")}
    assert ends == {0: worker.end_ns, 1: worker.end_ns}


async def test_a_request_that_ends_while_its_prompt_is_computed_again_decodes_no_longer(
    collector: Collector,
) -> None:
    tracing = start_tracing(collector.url)
    assert tracing is not None
    trace = tracing.begin("POST", CHAT, [])
    assert trace is not None
    booking = SimpleNamespace(worker_id="0", decision=SimpleNamespace(generation=1))
    request_trace = RequestTrace(trace, "r")
    request_trace.send([booking])  # type: ignore[list-item]
    names = ["queue", "prefill", "decode", "queue", "prefill"]
    request_trace.take(
        [
            Phase(name, start, start + 1, next_name=following)
            for start, (name, following) in enumerate(pairwise(names), 1)
        ]
    )
    request_trace.end()
    trace.end(200)
    await tracing.close()
    assert [span.end_ns for span in collector.named("decode")] == [4]


async def test_migration_shows_both_workers_and_the_gap(collector: Collector) -> None:
    tracing = start_tracing(collector.url)
    assert tracing is not None
    pool, transports = WorkerPool([Role.MIXED] * 2, RouterConfig(policy=Policy.ROUND_ROBIN), 1), []
    for index in range(2):
        transports.append(InMemoryTransport(make_scheduled_engine()))  # type: ignore[arg-type]
        pool.roster.use(index, await WorkerClient.over(transports[index]), 1)
    trace = tracing.begin("POST", CHAT, [])
    assert trace is not None
    sampling = SamplingParams(max_tokens=4)
    request = GenerateRequest(request_id="r", prompt_token_ids=[1, 2], sampling=sampling, seed=1)
    with pool.place([request], trace=trace) as placement:
        await placement.start()
        for _ in range(2):
            transports[0].worker.step()
        transports[0].lose()
        await asyncio.sleep(0.01)
        while not placement.stream.is_done:
            transports[1].worker.step()
    trace.end(200)
    await tracing.close()
    lost, other = collector.named("worker")
    [migration] = collector.named("migration")

    assert lost.is_error
    assert lost.attributes["error.type"] == "worker_lost"
    assert (lost.attributes["pelton.worker.id"], other.attributes["pelton.worker.id"]) == ("0", "1")
    assert migration.attributes["pelton.worker.lost"] == "0"
    assert lost.end_ns <= migration.start_ns < migration.end_ns <= other.start_ns
    assert [s.attributes["pelton.worker.id"] for s in collector.named("decode")] == ["0", "1"]


@pytest.mark.parametrize("listens", [False, True])
async def test_a_collector_that_is_not_there_or_never_answers_costs_no_reply(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        if listens:
            unused.listen()
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
        async with running_server(engine=None, otlp_endpoint=url) as server:
            replies = [await server.post(CHAT, BODY) for _ in range(20)]
            await send_spans(server)
    assert {reply.status for reply in replies} == {200}


async def test_without_an_endpoint_nothing_is_traced() -> None:
    async with running_server(engine=make_scheduled_engine()) as server:  # type: ignore[arg-type]
        await server.post(CHAT, BODY, headers={"traceparent": PARENT})
        assert server.frontend.tracing is None
        assert server.engine.take_phases() == {}


def test_the_standard_variables_work_and_the_option_comes_first(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    one_span(start_tracing(""))
    assert collector.resources[0]["service.name"] == "mine"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    one_span(start_tracing(f"{collector.url}/"))
    assert len(collector.spans) == 2
    assert collector.paths == {"/v1/traces"}
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing("") is None


def one_span(tracing: Tracing | None) -> None:
    assert tracing is not None
    trace = tracing.begin("POST", CHAT, [])
    assert trace is not None
    trace.end(200)
    asyncio.run(tracing.close())


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'pelton\[otel\]'"):
        start_tracing("http://localhost:4318")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://host", "/v1/traces"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        start_tracing(endpoint)
