# SPDX-License-Identifier: Apache-2.0
"""The two shapes of a reply, chat and completion: whole bodies, and events put together from
pieces that were encoded once.

An event is one line of strict JSON. What never changes in a stream (id, model, creation time) is
encoded when the stream starts; an event of the usual kind costs one string encoding.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from pelton.core.errors import PeltonError
from pelton.core.request import TokenLogprobs
from pelton.serving.http import schema
from pelton.serving.http.choice import Choice
from pelton.serving.http.replies import encode_json, make_error
from pelton.serving.http.schema import Usage
from pelton.serving.parsers.message import MessageDelta
from pelton.serving.tokenizer import Tokenizer

DONE_EVENT = b"data: [DONE]\n\n"
_NO_FINISH = b',"finish_reason":null}]'
_FINISH = {
    None: _NO_FINISH,
    "stop": b',"finish_reason":"stop"}]',
    "length": b',"finish_reason":"length"}]',
    "tool_calls": b',"finish_reason":"tool_calls"}]',
}
_END = b"}\n\n"
_CONTENT_KEY = b'{"content":'


class ReplyFormat(Protocol):
    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Events that come before the first text; may be none."""
        ...

    def event(self, choice: Choice, usage: Usage | None = None) -> bytes:
        """What the choice has that was not written yet, as one event."""
        ...

    def ending(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        """What closes a stream, after the last events of all choices; `usage` if it is wanted."""
        ...

    def error_event(self, error: PeltonError) -> bytes:
        """What closes a stream that failed."""
        ...

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The whole reply of a request that is not streamed."""
        ...


class _Common:
    """Heads and tails of events."""

    _chunk_name: ClassVar[str]

    def __init__(
        self,
        reply_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
        has_token_ids: bool,
    ) -> None:
        self._id, self._model, self._created, self._tokenizer = reply_id, model, created, tokenizer
        self._has_logprobs, self._has_token_ids = has_logprobs, has_token_ids
        fields = {"id": reply_id, "object": self._chunk_name, "created": created, "model": model}
        self._start = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._heads: dict[int, bytes] = {}

    def ending(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        if usage is None:
            return DONE_EVENT
        return self._start + b"]" + _usage_part(usage) + _END + DONE_EVENT

    def error_event(self, error: PeltonError) -> bytes:
        return b"data: " + encode_json(make_error(error)) + b"\n\n" + DONE_EVENT


def _usage_part(usage: Usage | None) -> bytes:
    return b',"usage":' + encode_json(usage) if usage is not None else b""


class ChatFormat(_Common):
    _chunk_name = "chat.completion.chunk"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        events = []
        for position, choice in enumerate(choices):
            index = str(choice.index).encode()
            self._heads[choice.index] = (
                self._start + b'{"index":' + index + b',"delta":' + _CONTENT_KEY
            )
            prompt = b""
            if self._has_token_ids and position == 0:
                prompt = b',"prompt_token_ids":' + encode_json(choice.prompt_token_ids)
            delta = b'{"index":' + index + b',"delta":{"role":"assistant","content":""}'
            events.append(self._start + delta + _NO_FINISH + prompt + _END)
        return b"".join(events)

    def event(self, choice: Choice, usage: Usage | None = None) -> bytes:
        extra = b"}"
        if self._has_logprobs or self._has_token_ids:
            extra += self._extra(choice)
        head, content = self._heads[choice.index], encode_json(choice.text)
        if choice.message is not None:
            head = head.removesuffix(_CONTENT_KEY)
            content, extra = encode_json(_chunk_delta(choice.delta)), extra[1:]
        return b"".join(
            (
                head,
                content,
                extra,
                _FINISH[choice.finish_reason],
                _usage_part(usage),
                _END,
            )
        )

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        reply = schema.ChatResponse(
            self._id,
            "chat.completion",
            self._created,
            self._model,
            [self._whole(choice) for choice in choices],
            usage,
            choices[0].prompt_token_ids if self._has_token_ids else None,
        )
        return encode_json(reply)

    def _whole(self, choice: Choice) -> schema.ChatChoice:
        return schema.ChatChoice(
            choice.index,
            _assistant_message(choice),
            _known_reason(choice),
            self._logprobs(choice.logprobs) if self._has_logprobs else None,
            choice.token_ids if self._has_token_ids else None,
        )

    def _extra(self, choice: Choice) -> bytes:
        extra = b""
        if self._has_logprobs:
            extra += b',"logprobs":' + encode_json(self._logprobs(choice.logprobs))
        if self._has_token_ids:
            extra += b',"token_ids":' + encode_json(choice.token_ids)
        return extra

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> schema.ChatLogprobs:
        table, text_of = self._tokenizer.token_bytes, self._tokenizer.token_text
        return schema.ChatLogprobs(
            [
                schema.ChatTokenLogprob(
                    text_of(entry.token_id),
                    entry.logprob,
                    list(table[entry.token_id]),
                    [
                        schema.TopLogprob(text_of(token_id), logprob, list(table[token_id]))
                        for token_id, logprob in entry.top
                    ],
                )
                for entry in entries
            ]
        )


class CompletionFormat(_Common):
    _chunk_name = "text_completion"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        for choice in choices:
            index = str(choice.index).encode()
            self._heads[choice.index] = self._start + b'{"index":' + index + b',"text":'
        return b""

    def event(self, choice: Choice, usage: Usage | None = None) -> bytes:
        extra = b""
        if self._has_logprobs or self._has_token_ids:
            extra = self._extra(choice)
        return b"".join(
            (
                self._heads[choice.index],
                encode_json(choice.text),
                extra,
                _FINISH[choice.finish_reason],
                _usage_part(usage),
                _END,
            )
        )

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        reply = schema.CompletionResponse(
            self._id,
            "text_completion",
            self._created,
            self._model,
            [self._whole(choice) for choice in choices],
            usage,
        )
        return encode_json(reply)

    def _whole(self, choice: Choice) -> schema.CompletionChoice:
        return schema.CompletionChoice(
            choice.index,
            choice.text,
            _known_reason(choice),
            self._logprobs(choice) if self._has_logprobs else None,
            choice.token_ids if self._has_token_ids else None,
            choice.prompt_token_ids if self._has_token_ids else None,
        )

    def _extra(self, choice: Choice) -> bytes:
        extra = b""
        if self._has_logprobs:
            extra += b',"logprobs":' + encode_json(self._logprobs(choice))
        if self._has_token_ids:
            extra += b',"token_ids":' + encode_json(choice.token_ids)
            if not choice.is_opened:
                extra += b',"prompt_token_ids":' + encode_json(choice.prompt_token_ids)
        return extra

    def _logprobs(self, choice: Choice) -> schema.CompletionLogprobs:
        """Of an echoed prompt first, then of the output. Moves `choice.text_offset` on."""
        text_of = self._tokenizer.token_text
        result = schema.CompletionLogprobs([], [], [], [])
        entries: list[tuple[int, TokenLogprobs | None]] = list(
            zip(choice.prompt_token_ids, choice.prompt_logprobs, strict=False)
        )
        entries += [(entry.token_id, entry) for entry in choice.logprobs]
        for token_id, entry in entries:
            text = text_of(token_id)
            result.text_offset.append(choice.text_offset)
            result.tokens.append(text)
            result.token_logprobs.append(entry.logprob if entry else None)
            top = {text_of(i): logprob for i, logprob in entry.top} if entry else None
            result.top_logprobs.append(top)
            choice.text_offset += len(text)
        return result


def _known_reason(choice: Choice) -> schema.FinishReasonText:
    match choice.finish_reason:
        case "stop" | "tool_calls" as reason:
            return "stop" if reason == "stop" else "tool_calls"
        case _:
            return "length"


def _assistant_message(choice: Choice) -> schema.AssistantMessage:
    message = choice.message
    if message is None:
        return schema.AssistantMessage("assistant", choice.text)
    if choice.num_broken_calls and choice.finish_reason == "stop":
        # A call that did not parse: the text as the model wrote it.
        return schema.AssistantMessage("assistant", choice.raw_content, message.reasoning or None)
    calls = [
        schema.ToolCall(call.call_id, "function", schema.FunctionCall(call.name, call.arguments))
        for call in message.tool_calls
    ]
    content = None if calls and not message.content else message.content
    return schema.AssistantMessage("assistant", content, message.reasoning or None, calls or None)


def _chunk_delta(delta: MessageDelta) -> schema.Delta:
    calls = [
        schema.ToolCallChunk(
            call.index,
            call.call_id or None,
            "function" if call.name else None,
            schema.FunctionCallDelta(call.name or None, call.arguments),
        )
        for call in delta.tool_calls
    ]
    return schema.Delta(None, delta.content or None, delta.reasoning or None, calls or None)
