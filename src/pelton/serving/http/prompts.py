# SPDX-License-Identifier: Apache-2.0
"""Text and messages to token ids. Large ones are worked on in a thread, so that no stream waits."""

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec

from pelton.core.errors import ContextLengthError, InvalidRequestError
from pelton.serving.http.frontend import Frontend
from pelton.serving.parsers.harmony_prompt import render_harmony

_MAX_INLINE_SIZE = 8192
"""Tokenising so many takes about as long as a step; more goes to a thread."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


async def encode_texts(
    frontend: Frontend, texts: list[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """Raises `ContextLengthError` for a text that is far too long, before any work on it."""
    tokenizer, limit = frontend.tokenizer, _max_text_bytes(frontend)
    for text in texts:
        _check_length(text, limit)

    def encode_all() -> list[list[int]]:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]

    return await run_by_size(sum(map(len, texts)), encode_all)


async def encode_messages(
    frontend: Frontend,
    messages: list[dict[str, Any]],
    *,
    num_body_bytes: int,
    tools: list[dict[str, Any]] | None = None,
    template: str | None = None,
    variables: dict[str, Any] | None = None,
    add_generation_prompt: bool = True,
    reasoning_effort: str | None = None,
    response_schema: Any = None,
) -> list[int]:
    """Raises `InvalidRequestError` for messages that are malformed or that the template refuses.
    A template of the request's own is rendered in another process (see `template_process`)."""
    for i, message in enumerate(messages):
        _check_message(i, message)
    output_format = frontend.output_format
    if not output_format.is_harmony:
        messages = with_parsed_calls(messages, keeps_text=output_format.tools == "deepseek")
    limit = _max_text_bytes(frontend)
    variables = _free_variables(variables)
    if reasoning_effort is not None:
        variables = {"reasoning_effort": reasoning_effort, **variables}
    arguments: dict[str, Any] = {
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
    }

    def encode(text: str) -> list[int]:
        _check_length(text, limit)
        return frontend.tokenizer.encode(text, add_special_tokens=False)

    if template:
        arguments["template"] = template
        text = await frontend.template_process.render(arguments, variables)
        return await run_by_size(len(text), encode, text)
    if output_format.is_harmony:
        effort = str(variables.get("reasoning_effort", "medium"))
        return await run_by_size(
            num_body_bytes,
            lambda: encode(
                render_harmony(
                    messages,
                    tools=tools,
                    effort=effort,
                    response_schema=response_schema,
                    add_generation_prompt=add_generation_prompt,
                )
            ),
        )
    # Many empty messages take as long as long ones: all that came counts.
    return await run_by_size(
        num_body_bytes,
        lambda: encode(frontend.chat_template.render(**arguments, **variables)),
    )


def _max_text_bytes(frontend: Frontend) -> int:
    return frontend.info.max_model_len * frontend.tokenizer.max_token_bytes


def _check_length(text: str, max_bytes: int) -> None:
    """Tokenising what cannot fit would cost memory and seconds only to be refused."""
    if len(text) > max_bytes:
        raise ContextLengthError(
            f"A text of {len(text)} characters cannot fit the context, which holds at most"
            f" {max_bytes} bytes of text.",
            param="prompt",
        )


async def run_by_size(
    size: int,
    function: Callable[ParamsT, ResultT],
    *args: ParamsT.args,
    **kwargs: ParamsT.kwargs,
) -> ResultT:
    """Calls `function`: in a thread if `size`, in characters or tokens, makes it take long."""
    if size <= _MAX_INLINE_SIZE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _check_message(index: int, message: dict[str, Any]) -> None:
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
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{path}[{i}] must have a function with a name.", param=f"{path}[{i}]"
            )


def with_parsed_calls(messages: list[dict[str, Any]], *, keeps_text: bool) -> list[dict[str, Any]]:
    """Messages as templates expect them: the arguments of tool calls as objects, unless they are
    kept as the JSON text that clients send."""
    result = []
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


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    try:
        return {**function, "arguments": msgspec.json.decode(arguments)}
    except (msgspec.DecodeError, RecursionError):
        return function


def _check_part(path: str, part: Any) -> None:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequestError(
            f"{path} must be a part of type 'text'; this model takes no other kind.", param=path
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"{path}.text must be a string.", param=f"{path}.text")


def _free_variables(variables: dict[str, Any] | None) -> dict[str, Any]:
    """Those that the template may be given; the ones with fields of their own are refused."""
    for name in ("messages", "tools", "template", "add_generation_prompt"):
        if variables and name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs must not hold {name!r}: it has a field of its own.",
                param="chat_template_kwargs",
            )
    return variables or {}
