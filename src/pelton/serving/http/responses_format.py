# SPDX-License-Identifier: Apache-2.0
"""The shape of replies of the Responses API: one object, or events that build it up.

An output is a list of items: reasoning, a message, function calls. Streamed, an item is added, its
text comes in deltas, and it is done before the next is added; each event carries its number.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from pelton.core.errors import PeltonError
from pelton.serving.http import schema
from pelton.serving.http.choice import Choice
from pelton.serving.http.replies import encode_json
from pelton.serving.http.schema import Usage
from pelton.serving.parsers.message import MessageDelta, ToolCallDelta
from pelton.serving.tokenizer import Tokenizer


class _Item:
    """One item while it grows."""

    def __init__(self, kind: str, index: int, name: str = "", call_id: str = "") -> None:
        prefix = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[kind]
        self.id = prefix + secrets.token_hex(12)
        self.kind, self.index = kind, index
        self.name, self.call_id = name, call_id
        self.text = ""

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def whole(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [self.part()] if self.text else []
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": content}
        if self.kind == "message":
            return {**item, "role": "assistant", "content": content}
        return {**item, "call_id": self.call_id, "name": self.name, "arguments": self.text}


class ResponsesFormat:
    def __init__(
        self,
        body: schema.ResponsesRequest,
        reply_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        has_logprobs: bool,
        has_token_ids: bool,
    ) -> None:
        self._body = body
        self._id, self._model, self._created = reply_id, model, created
        self._number = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None

    def opening(self, choices: Sequence[Choice]) -> bytes:
        response = self._response("in_progress", [], None)
        return self._encode("response.created", response=response) + self._encode(
            "response.in_progress", response=response
        )

    def event(self, choice: Choice, usage: Usage | None = None) -> bytes:
        delta = choice.delta
        if choice.message is None:
            delta = MessageDelta(content=choice.text)
        events = []
        if delta.reasoning:
            events.append(self._grow("reasoning", delta.reasoning))
        if delta.content:
            events.append(self._grow("message", delta.content))
        events += [self._call(call) for call in delta.tool_calls]
        if choice.finish_reason is not None:
            events.append(self._close())
        return b"".join(events)

    def ending(self, choices: Sequence[Choice], usage: Usage | None) -> bytes:
        status = _status(choices[0])
        output = [item.whole("completed") for item in self._items]
        response = self._response(status, output, choices[0])
        return self._encode(f"response.{status}", response=response)

    def error_event(self, error: PeltonError) -> bytes:
        return self._encode(
            "error", code=error.code or error.type, message=error.message, param=error.param
        )

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        message = choice.message
        items: list[_Item] = []

        def add(kind: str, text: str, name: str = "", call_id: str = "") -> None:
            items.append(_Item(kind, len(items), name, call_id))
            items[-1].text = text

        if message is None:
            add("message", choice.text)
        else:
            is_broken = bool(choice.num_broken_calls) and choice.finish_reason == "stop"
            content = choice.raw_content if is_broken else message.content
            if message.reasoning:
                add("reasoning", message.reasoning)
            if content or not message.tool_calls:
                add("message", content)
            for call in [] if is_broken else message.tool_calls:
                add("function_call", call.arguments, call.name, call.call_id)
        output = [item.whole("completed") for item in items]
        return encode_json(self._response(_status(choice), output, choice))

    def _grow(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._close() + self._add(_Item(kind, len(self._items)))
        item = self._open
        assert item is not None
        item.text += text
        name = "response.reasoning_text" if kind == "reasoning" else "response.output_text"
        extra: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return events + self._encode(f"{name}.delta", item, content_index=0, delta=text, **extra)

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if call.name:
            item = _Item("function_call", len(self._items), call.name, call.call_id)
            events = self._close() + self._add(item)
        if not call.arguments:
            return events
        assert self._open is not None
        self._open.text += call.arguments
        return events + self._encode(
            "response.function_call_arguments.delta", self._open, delta=call.arguments
        )

    def _add(self, item: _Item) -> bytes:
        self._items.append(item)
        self._open = item
        events = self._encode(
            "response.output_item.added", output_index=item.index, item=item.whole("in_progress")
        )
        if item.kind == "function_call":
            return events
        return events + self._encode(
            "response.content_part.added", item, content_index=0, part=item.part()
        )

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.kind == "function_call":
            events = self._encode(
                "response.function_call_arguments.done", item, name=item.name, arguments=item.text
            )
        else:
            is_reasoning = item.kind == "reasoning"
            name = "response.reasoning_text" if is_reasoning else "response.output_text"
            extra: dict[str, Any] = {} if is_reasoning else {"logprobs": []}
            events = self._encode(f"{name}.done", item, content_index=0, text=item.text, **extra)
            events += self._encode(
                "response.content_part.done", item, content_index=0, part=item.part()
            )
        return events + self._encode(
            "response.output_item.done", output_index=item.index, item=item.whole("completed")
        )

    def _encode(self, kind: str, about: _Item | None = None, /, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        if about is not None:
            event |= {"item_id": about.id, "output_index": about.index}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(event) + b"\n\n"

    def _response(
        self, status: str, output: list[dict[str, Any]], choice: Choice | None
    ) -> schema.ResponsesReply:
        body = self._body
        is_cut = status == "incomplete"
        return schema.ResponsesReply(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._model,
            output=output,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning=body.reasoning or {},
            store=False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            metadata=body.metadata or {},
            usage=None if choice is None else _usage(choice),
        )


def _usage(choice: Choice) -> schema.ResponsesUsage:
    num_prompt, num_output = len(choice.prompt_token_ids), choice.num_tokens
    output = schema.OutputTokensDetails(choice.num_reasoning_tokens)
    if choice.num_drafts:
        output.accepted_prediction_tokens = choice.num_accepted_drafts
        output.rejected_prediction_tokens = choice.num_drafts - choice.num_accepted_drafts
    return schema.ResponsesUsage(
        num_prompt,
        schema.PromptTokensDetails(choice.num_cached_tokens),
        num_output,
        output,
        num_prompt + num_output,
    )


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"
