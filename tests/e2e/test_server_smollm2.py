# SPDX-License-Identifier: Apache-2.0
"""The real model behind the real server."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_process import ServerProcess, running_server

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("smollm2", "--dtype", "float32", "--max-model-len", "1024") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120) as client:
        yield client


def test_real_answer_is_right(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=24, temperature=0
    )
    assert "Paris" in (reply.choices[0].message.content or "")


def test_stream_and_whole_have_the_same_tokens(client: openai.OpenAI) -> None:
    fields: Any = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(**fields, extra_body=extra).model_dump()
    stream = client.chat.completions.create(**fields, extra_body=extra, stream=True)
    streamed = [
        token_id
        for chunk in stream
        for choice in chunk.model_dump()["choices"]
        for token_id in choice.get("token_ids") or []
    ]
    assert streamed == whole["choices"][0]["token_ids"]


def test_tokens_do_not_depend_on_what_runs_beside(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    def answer() -> Any:
        reply = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=16, seed=11, temperature=0.8
        )
        return reply.choices[0].text

    alone = answer()
    other = client.completions.create(
        model="smollm2", prompt="The sea", max_tokens=200, stream=True, extra_body={"seed": 1}
    )
    next(iter(other))
    assert answer() == alone
    other.close()
