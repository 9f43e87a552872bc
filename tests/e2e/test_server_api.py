# SPDX-License-Identifier: Apache-2.0
"""A running server through the real `openai` client, raw sockets, and a storm of requests."""

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, running_server, suspended, wait_until

# The real engine and its block accounting; so few blocks that requests are preempted.
MODEL = "stand-in:smollm2?scheduled=1&num_blocks=600&max_num_requests=64&step_ms=0.2"
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server(
        MODEL,
        *("--served-model-name", "stand-in"),
        *("--max-body-bytes", "1MiB"),
        *("--max-num-batched-tokens", "4096"),
    ) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_of_the_openai_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="stand-in", messages=HELLO, max_completion_tokens=5, temperature=0, seed=1
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


def test_chat_stream_of_the_openai_client_equals_the_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": "stand-in", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    prompt = "The same words again and again. " * 20
    counts = []
    for _ in range(2):
        reply = client.completions.create(model="stand-in", prompt=prompt, max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        counts.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == 0
    assert counts[1] > 0


def test_completion_of_the_openai_client(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="stand-in", prompt=["a", "b"], max_tokens=3, n=2, logprobs=2, echo=False
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 3


def test_chat_logprobs_of_the_openai_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="stand-in", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3, 3]


def test_models_of_the_openai_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stand-in"]
    assert client.models.retrieve("stand-in").owned_by == "pelton"


def test_errors_become_the_openai_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="stand-in", messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)


def test_error_in_a_stream_becomes_an_exception(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    def begin(timeout_s: float) -> openai.Stream[Any] | None:
        """None: the deadline passed before the stream began."""
        try:
            return client.completions.create(
                model="stand-in",
                prompt="a",
                max_tokens=8000,
                stream=True,
                extra_body={"timeout_s": timeout_s},
            )
        except openai.APIStatusError as error:
            if error.status_code != 408:
                raise
            return None

    # The longer ones are for a machine that stood still.
    stream = next(filter(None, map(begin, (0.3, 3.0, 30.0))))
    with suspended(server.worker), pytest.raises(openai.APIError, match="deadline"):
        list(stream)


async def test_async_openai_client_streams_concurrently(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def count_tokens() -> int:
            stream = await client.chat.completions.create(
                model="stand-in",
                messages=HELLO,
                max_tokens=10,
                stream=True,
                stream_options={"include_usage": True},
            )
            counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
            return counts[-1]

        assert await asyncio.gather(*(count_tokens() for _ in range(20))) == [10] * 20


def test_huge_body_is_refused_before_it_is_sent(server: ServerProcess) -> None:
    with connect(server) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n"
        raw.sendall(head + b"{" * 1000)
        assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_huge_chunked_body_is_refused(server: ServerProcess) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    reply = httpx.post(f"{server.url}/v1/completions", content=body(), timeout=60)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_connection_is_kept_alive_between_requests(server: ServerProcess) -> None:
    data = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    with connect(server) as raw:
        for _ in range(3):
            raw.sendall(head.encode() + data)
            assert read_reply(raw).startswith(b"HTTP/1.1 200")


def test_burst_of_connections_is_accepted_at_once(server: ServerProcess) -> None:
    connections = [connect(server) for _ in range(500)]
    for raw in connections:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    for raw in connections:
        assert read_reply(raw).startswith(b"HTTP/1.1 200")
        raw.close()


def test_closed_socket_cancels_a_request_that_is_not_streamed(server: ServerProcess) -> None:
    data = json.dumps({"prompt": "a", "max_tokens": 8000}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    assert_at_rest(server)
    is_caught = False
    while not is_caught:
        num_done = server.metrics()["pelton_worker_generation_tokens_total"]
        aborted = server.metrics()["pelton_requests_aborted_total"]
        with connect(server) as raw:
            raw.sendall(head.encode() + data)
            wait_until(
                lambda start=num_done: (
                    server.metrics()["pelton_worker_generation_tokens_total"] > start
                )
            )
            server.worker.suspend()
            live = [server.metrics()["pelton_requests_live"] for _ in range(2)]
            is_caught = live == [1, 1]  # else it was done before
            if not is_caught:
                server.worker.resume()
    wait_until(lambda: server.metrics()["pelton_requests_aborted_total"] == aborted + 1)
    server.worker.resume()
    assert_at_rest(server)


@pytest.mark.slow
async def test_storm_of_requests_and_cancels_leaves_nothing(server: ServerProcess) -> None:
    """400 requests, four in ten of which leave at a random moment."""
    generator = random.Random(5)
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        with suspended(server.worker):
            storm = asyncio.gather(
                *(send_one(client, generator.randrange(2**32)) for _ in range(400))
            )
            # With so many at once there are too few blocks, however fast each is.
            await asyncio.to_thread(
                wait_until, lambda: server.metrics()["pelton_requests_live"] >= 100
            )
        outcomes = await storm
    assert set(outcomes) == {"left", "done"}
    assert_at_rest(server)
    assert server.metrics()["pelton_preemptions_total"] > 0


async def send_one(client: httpx.AsyncClient, seed: int) -> str:
    """One request of a random kind; "left" when it went away before the end."""
    generator = random.Random(seed)
    body = {
        "prompt": [generator.randrange(1000, 40000) for _ in range(generator.randrange(1, 300))],
        "max_tokens": generator.randrange(1, 60),
        "n": generator.choice([1, 1, 1, 3]),
        "stream": generator.random() < 0.6,
        "priority": generator.randrange(3),
    }
    if generator.random() < 0.2:
        body["prompt"] = [7] * 200  # shared by many: cached blocks are in the storm too
    leaves_after_s = generator.random() * 0.5 if generator.random() < 0.4 else None
    try:
        async with asyncio.timeout(leaves_after_s):
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                assert reply.status_code == 200, await reply.aread()
                async for _ in reply.aiter_bytes():
                    pass
    except TimeoutError:
        return "left"
    return "done"


def assert_at_rest(server: ServerProcess) -> None:
    """No request, no used block: as when the server started."""
    names = ("pelton_requests_live", "pelton_requests_running", "pelton_requests_waiting")

    def is_at_rest() -> bool:
        metrics = server.metrics()
        return not any(metrics[name] for name in (*names, "pelton_kv_blocks_used"))

    wait_until(is_at_rest)


def connect(server: ServerProcess) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_reply(raw: socket.socket) -> bytes:
    """One reply with a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(4096)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += raw.recv(4096)
    return head + b"\r\n\r\n" + body
