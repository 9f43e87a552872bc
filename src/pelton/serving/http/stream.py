# SPDX-License-Identifier: Apache-2.0
"""Runs one generation for one HTTP request and writes its reply, streamed or whole.

The reply is an ASGI application: it submits, reads what has arrived, and writes. Nothing is sent
before the first output is there, so that whatever keeps a request from starting is an HTTP status
also for a stream. All that a stream got since its last write goes out as one event. A second task
only waits for the client to leave; then the requests are cancelled in the worker at once.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from pelton.core.errors import GrammarError, PeltonError
from pelton.core.request import GenerateRequest, RequestOutput
from pelton.serving.http.choice import Choice
from pelton.serving.http.formats import ReplyFormat
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.replies import (
    EVENTS_TYPE,
    ErrorReply,
    Exchange,
    JSONReply,
)
from pelton.serving.http.schema import CompletionTokensDetails, PromptTokensDetails, Usage
from pelton.serving.placement import Placement
from pelton.serving.request_stream import RequestStream
from pelton.serving.tracing import Attributes

_WRITE_GRACE_S = 5.0
"""How long after its deadline a reply may still be written to a client that reads slowly."""
_log = logging.getLogger("pelton.serving")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    is_streamed: bool
    stream_interval: int
    include_usage: bool = False
    continuous_usage: bool = False


class GenerationReply:
    """`choices` are grouped by request: n of the first, then n of the second, and so on."""

    def __init__(
        self,
        frontend: Frontend,
        exchange: Exchange,
        requests: Sequence[GenerateRequest],
        choices: Sequence[Choice],
        reply_format: ReplyFormat,
        options: ReplyOptions,
        deadline_s: float,
    ) -> None:
        self._frontend = frontend
        self._exchange = exchange
        self._requests = requests
        self._choices = choices
        self._format = reply_format
        self._options = options
        self._deadline_s = deadline_s
        self.is_started = False
        """Whether the status has been sent."""
        self._num_open = len(choices)
        """Choices that are not finished."""
        self._has_client = True
        self._num_per_request = len(choices) // len(requests)
        self._first_choice = {
            request.request_id: position * self._num_per_request
            for position, request in enumerate(requests)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with (
                self._frontend.admit(len(self._requests), self._requests[0].priority),
                self._frontend.place(self._exchange, self._requests) as placement,
            ):
                await self._run(placement, receive, send)
        except PeltonError as error:
            await self._send_error(error, scope, receive, send)

    async def _run(self, placement: Placement, receive: Receive, send: Send) -> None:
        loop, stream = asyncio.get_running_loop(), placement.stream
        watch = loop.create_task(self._cancel_when_client_leaves(receive, stream))
        limit_s = loop.time() + self._deadline_s - time.monotonic() + _WRITE_GRACE_S
        try:
            async with asyncio.timeout_at(limit_s):
                await placement.start()
                if placement.decision is not None:
                    self._exchange.route = placement.decision.header
                if self._options.is_streamed:
                    await self._write_events(stream, send)
                else:
                    await self._write_whole(stream, send)
        except TimeoutError:
            # The client does not read: there is nobody to tell. The server closes the connection.
            _log.warning("event=reply_abandoned request_id=%s", self._exchange.request_id)
        finally:
            watch.cancel()
            stream.cancel()
            self._account(placement)

    async def _cancel_when_client_leaves(self, receive: Receive, stream: RequestStream) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not stream.is_done:
            self._has_client = False
            stream.cancel()

    async def _write_whole(self, stream: RequestStream, send: Send) -> None:
        if any(request.sampling.stop for request in self._requests):
            async for outputs in stream:
                for choice in self._take(outputs):
                    self._close_finished(choice, stream)
        else:
            self._take(await stream.collect())
            self._num_open = 0
        if self._has_client:
            reply = JSONReply(self._exchange, self._format.body(self._choices, self._usage()))
            await self._start(send, reply.raw_headers)
            await send({"type": "http.response.body", "body": reply.body})

    async def _write_events(self, stream: RequestStream, send: Send) -> None:
        interval = self._options.stream_interval
        async for outputs in stream:
            body = b""
            if not self.is_started:
                headers = [EVENTS_TYPE, (b"cache-control", b"no-cache")]
                await self._start(send, headers + self._exchange.headers())
                body = self._format.opening(self._choices)
            for choice in self._take(outputs):
                if choice.is_due(interval):
                    body += self._event(choice)
                self._close_finished(choice, stream)
            if self._num_open == 0:
                await send({"type": "http.response.body", "body": body + self._ending()})
                return
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

    def _take(self, outputs: list[RequestOutput]) -> Sequence[Choice]:
        """Gives outputs to their choices; returns those that changed and were not finished."""
        choices = self._choices
        if len(choices) == 1:
            (choice,) = choices
            for output in outputs:
                choice.take(output)
            return choices
        changed: dict[int, Choice] = {}
        for output in outputs:
            choice = choices[self._first_choice[output.request_id] + output.index]
            if choice.finish_reason is None:
                choice.take(output)
                changed[choice.index] = choice
        return list(changed.values())

    def _close_finished(self, choice: Choice, stream: RequestStream) -> None:
        """Counts a choice that finished, and ends it in the worker if only a stop string did."""
        if choice.finish_reason is not None:
            self._num_open -= 1
            request, index = divmod(choice.index, self._num_per_request)
            stream.cancel_choice(self._requests[request].request_id, index)

    def _event(self, choice: Choice) -> bytes:
        usage = self._usage() if self._options.continuous_usage else None
        event = self._format.event(choice, usage)
        choice.flush()
        return event

    def _ending(self) -> bytes:
        usage = self._usage()
        return self._format.ending(self._choices, usage if self._options.include_usage else None)

    def _usage(self) -> Usage:
        num_prompt = sum(len(request.prompt_token_ids) for request in self._requests)
        num_output = sum(choice.num_tokens for choice in self._choices)
        details = PromptTokensDetails(self._num_cached_tokens())
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        num_drafts = sum(choice.num_drafts for choice in self._choices)
        output = None
        if num_drafts or num_reasoning:
            num_accepted = sum(choice.num_accepted_drafts for choice in self._choices)
            output = CompletionTokensDetails(num_reasoning, num_accepted, num_drafts - num_accepted)
        return Usage(num_prompt, num_output, num_prompt + num_output, details, output)

    def _num_cached_tokens(self) -> int:
        """Of the requests' first choices: the others share the prompt that the first computed."""
        return sum(self._choices[i].num_cached_tokens for i in self._first_choice.values())

    async def _start(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_error(
        self, error: PeltonError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._frontend.metrics.errors[error.code or error.type] += 1
        if isinstance(error, GrammarError) and (grammar := self._requests[0].sampling.grammar):
            error.param = grammar.param  # which the engine knows nothing of
        if not self.is_started:
            await ErrorReply(self._exchange, error)(scope, receive, send)
            return
        if self._exchange.trace is not None:
            self._exchange.trace.fail(error)
        await send({"type": "http.response.body", "body": self._format.error_event(error)})

    def _account(self, placement: Placement) -> None:
        metrics, trace = self._frontend.metrics, self._exchange.trace
        if trace is not None:
            trace.describe(self._trace_attributes(placement.stream.first_output_s))
        if placement.decision is None:  # no worker got any of it
            metrics.num_aborted += not self._has_client
            return
        metrics.prompt_tokens += sum(len(r.prompt_token_ids) for r in self._requests)
        metrics.cached_tokens += self._num_cached_tokens()
        metrics.generation_tokens += sum(choice.num_tokens for choice in self._choices)
        metrics.broken_tool_calls += sum(choice.num_broken_calls for choice in self._choices)
        if not self._has_client:
            metrics.num_aborted += 1
            return
        if self._num_open:
            return
        for choice in self._choices:
            metrics.finished[choice.finish_reason or ""] += 1
        longest = max(choice.num_tokens for choice in self._choices)
        metrics.observe_times(
            self._exchange.arrival_s, placement.stream.first_output_s, time.monotonic(), longest
        )

    def _trace_attributes(self, first_output_s: float | None) -> Attributes:
        """What the conventions for GenAI have names for."""
        usage, request, sampling = self._usage(), self._requests[0], self._requests[0].sampling
        has_several = len(self._requests) > 1
        response_id = request.request_id.rsplit("-", has_several)[0]
        name, prompt_details = self._frontend.served_name, usage.prompt_tokens_details
        reasons = [choice.finish_reason for choice in self._choices if choice.finish_reason]
        optional = {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.stop_sequences": sampling.stop or None,
            "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
            "gen_ai.response.finish_reasons": reasons or None,
            "gen_ai.response.time_to_first_chunk": (
                first_output_s and first_output_s - self._exchange.arrival_s
            ),
        }
        return {
            "gen_ai.request.model": name,
            "gen_ai.request.stream": self._options.is_streamed,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.id": response_id,
            "gen_ai.response.model": name,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": prompt_details.cached_tokens,
            "pelton.request_id": self._exchange.request_id,
            **{key: value for key, value in optional.items() if value is not None},
        }
