# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompt text, in the way of one model: by its chat template or in harmony."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pelton.core.errors import InvalidRequestError
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.parsers.formats import OutputFormat
from pelton.serving.parsers.harmony_prompt import render_harmony

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class PromptWriter:
    def __init__(self, template: ChatTemplate, output_format: OutputFormat) -> None:
        self._template = template
        self._format = output_format

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        response_schema: Any = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Special tokens written out. `template` replaces the model's own way, whatever it is;
        `variables` are passed on to it, and hold `reasoning_effort` for harmony. `messages` must
        have passed `check_messages`. Raises `InvalidRequestError` for what cannot be rendered."""
        variables = variables or {}
        if self._format.is_harmony and not template:
            return render_harmony(
                messages,
                tools=tools,
                effort=str(variables.get("reasoning_effort", "medium")),
                response_schema=response_schema,
                add_generation_prompt=add_generation_prompt,
            )
        messages = self.prepare(messages)
        return self._template.render(messages, tools, add_generation_prompt, template, **variables)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """As the templates of the model's family expect them."""
        if self._format.is_harmony:
            return messages
        return _with_parsed_calls(messages, keeps_text=self._format.tools == "deepseek")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises `InvalidRequestError` for a malformed one."""
    for i, message in enumerate(messages):
        _check_message(i, message)


def _check_message(index: int, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    check_role(f"messages[{index}].role", role)
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(f"messages[{index}].tool_calls", calls)
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return
        raise InvalidRequestError(
            f"messages[{index}].content is required: a string, or an array of text parts.",
            param=f"messages[{index}].content",
        )
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or an array of text parts.",
            param=f"messages[{index}].content",
        )
    for i, part in enumerate(content):
        _check_part(f"messages[{index}].content[{i}]", part)


def check_role(path: str, role: Any) -> None:
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{path} must be one of {', '.join(_ROLES)}, got {role!r:.64}.", param=path
        )


def _check_calls(path: str, calls: Any) -> None:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{path} must be an array.", param=path)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{path}[{i}] must have a function with a name.", param=f"{path}[{i}]"
            )


def _with_parsed_calls(
    messages: Sequence[Mapping[str, Any]], *, keeps_text: bool
) -> list[Mapping[str, Any]]:
    """Messages as templates expect them: the arguments of tool calls as objects, unless they are
    kept as the JSON text that clients send."""
    result: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            if not keeps_text:
                calls = [{**call, "function": _parsed(call["function"])} for call in calls]
            content = message.get("content")
            if content is None and not keeps_text:
                content = ""
            message = {**message, "content": content, "tool_calls": calls}
        result.append(message)
    return result


def _parsed(function: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": msgspec.json.decode(arguments)}
    except (msgspec.DecodeError, RecursionError):
        return function


def _check_part(path: str, part: Any) -> None:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InvalidRequestError(
            f"{path} must be a part of type 'text'; this model takes no other kind.", param=path
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{path}.text must be a string.", param=f"{path}.text")
