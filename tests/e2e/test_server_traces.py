# SPDX-License-Identifier: Apache-2.0
"""`pelton serve --otlp-endpoint` as processes: one trace over the frontend and both workers."""

import subprocess

import httpx
from server_process import running_server, serve_command

from trace_collector import running_collector

MODEL = (
    *("smollm2", "--random-weights", "smollm2-135m", "--layers", "1", "--dtype", "float32"),
    *("--device", "cpu", "--num-threads", "1", "--max-model-len", "1024", "--num-blocks", "100"),
)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_prompt_computed_elsewhere_is_one_trace() -> None:
    body = {"prompt": list(range(300, 500)), "max_tokens": 4, "ignore_eos": True}
    with running_collector() as collector:
        options = ("--prefill", "1", "--decode", "1", "--otlp-endpoint", collector.url)
        with running_server(*MODEL, *options) as server:
            headers = {"traceparent": PARENT}
            url = f"{server.url}/v1/completions"
            httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()
        # It was told to stop: what is done is sent before it ends.
    of_prefill, of_decode = (
        {span.name for span in collector.spans if span.attributes.get("pelton.worker.id") == worker}
        for worker in "01"
    )

    assert {span.trace_id for span in collector.spans} == {PARENT.split("-")[1]}
    assert of_prefill == {"route", "queue", "prefill"}
    assert of_decode == {"route", "worker", "queue", "kv_pull", "decode"}
    [pull] = collector.named("kv_pull")
    assert pull.attributes["pelton.kv.bytes"] > 0
    for span in collector.spans:
        assert 0 <= span.end_ns - span.start_ns < 60e9


def test_an_endpoint_that_cannot_be_used_ends_the_start() -> None:
    command = serve_command("stand-in:smollm2", "--port", "0", "--otlp-endpoint", "nowhere")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "http://localhost:4318" in done.stderr
