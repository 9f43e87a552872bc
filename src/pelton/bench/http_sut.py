# SPDX-License-Identifier: Apache-2.0
"""A server over HTTP as the system under test: OpenAI's API, streamed, with token ids.

Tokens are counted from `token_ids` (asked for by `return_token_ids`), never by tokenising text
again. A chat sample goes to /v1/chat/completions, the others to /v1/completions.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec

from pelton.bench.load_messages import HttpTarget
from pelton.bench.traffic import Sample
from pelton.core.errors import PeltonError
from pelton.core.ports import TokenArrival
from pelton.core.request import FinishReason

_IDLE_CONNECTION_S = 4.0
"""Shorter than servers keep one: a request must not meet a connection that is being closed."""
_MAX_ERROR_BYTES = 2000
_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
}


class RequestFailedError(PeltonError):
    """A request that the server did not answer as it should."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    text: str | None = None
    delta: dict[str, Any] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class HttpSut:
    """Implements `core.ports.SystemUnderTest` for `Sample`."""

    def __init__(self, target: HttpTarget, *, may_reuse_prefixes: bool) -> None:
        self._target = target
        self._may_reuse_prefixes = may_reuse_prefixes
        headers = {"Content-Type": "application/json"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
            read_bufsize=2**18,
        )

    async def generate(self, sample: Sample, request_id: str) -> AsyncGenerator[TokenArrival, None]:
        route = "chat/completions" if sample.messages is not None else "completions"
        body = msgspec.json.encode(self._make_body(sample, request_id))
        is_finished = False
        async with self._session.post(f"{self._target.url}/v1/{route}", data=body) as response:
            if response.status != 200:
                text = (await response.content.read(_MAX_ERROR_BYTES)).decode(errors="replace")
                raise RequestFailedError(f"HTTP {response.status}: {_error_message(text)}")
            async for data in _read_events(response.content):
                arrival = _read_chunk(data)
                if arrival is not None:
                    is_finished = is_finished or arrival.finish_reason is not None
                    yield arrival
        if not is_finished:
            raise RequestFailedError("The stream ended before a finish_reason.")

    async def close(self) -> None:
        await self._session.close()

    def _make_body(self, sample: Sample, request_id: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._target.model,
            "temperature": 0,
            "min_tokens": sample.max_tokens if sample.ignore_eos else 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if sample.ignore_eos:
            body["ignore_eos"] = True
        if not self._may_reuse_prefixes:
            body["cache_salt"] = request_id
        if sample.messages is not None:
            return body | {
                "messages": sample.messages, "max_completion_tokens": sample.max_tokens
            }  # fmt: skip
        prompt = sample.prompt if sample.input_tokens is None else sample.input_tokens
        return body | {"prompt": prompt, "max_tokens": sample.max_tokens}


async def _read_events(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event, as soon as its line is complete."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    yield data


def _read_chunk(data: bytes) -> TokenArrival | None:
    """One chunk's tokens and counts; None for a chunk that carries neither (a role, say)."""
    time_ns = time.time_ns()
    try:
        chunk = _decode_chunk(data)
    except msgspec.DecodeError as error:
        raise RequestFailedError(f"The stream holds what is not a chunk: {error}.") from error
    if chunk.error is not None:
        raise RequestFailedError(str(chunk.error.get("message", chunk.error)))
    if not chunk.choices:
        return None if chunk.usage is None else _counts(time_ns, chunk.usage)
    choice = chunk.choices[0]
    has_text = bool(choice.text or (choice.delta or {}).get("content"))
    if has_text and choice.token_ids is None:
        raise RequestFailedError(
            "The server does not return token ids (return_token_ids), which token latencies need."
        )
    finish_reason = None
    if choice.finish_reason is not None:
        finish_reason = _FINISH_REASONS.get(choice.finish_reason)
        if finish_reason is None:
            raise RequestFailedError(f"The server ended it: {choice.finish_reason}.")
    if not choice.token_ids and finish_reason is None:
        return None
    return TokenArrival(time_ns, choice.token_ids or [], finish_reason)


def _counts(time_ns: int, usage: _Usage) -> TokenArrival:
    details = usage.prompt_tokens_details
    return TokenArrival(
        time_ns,
        [],
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=None if details is None else details.cached_tokens,
    )


def _error_message(text: str) -> str:
    """The message of OpenAI's error body, or the start of whatever came."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return text[:200]
