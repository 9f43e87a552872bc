# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses: the Responses API without memory, as a chat in other words.

Nothing is stored: every request carries the whole conversation, and `store` has no effect, which
the reply says.
"""

from functools import partial
from typing import Any

from pelton.core.errors import InvalidRequestError
from pelton.serving.http import schema
from pelton.serving.http.chat import reply_to_chat
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.replies import Exchange
from pelton.serving.http.responses_format import ResponsesFormat
from pelton.serving.http.stream import GenerationReply
from pelton.serving.prompt_writer import check_role

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


async def answer_response(
    frontend: Frontend, exchange: Exchange, body: schema.ResponsesRequest
) -> GenerationReply:
    _refuse_fields(body)
    text_format = (body.text or {}).get("format")
    if text_format is not None and not isinstance(text_format, dict):
        raise InvalidRequestError("text.format must be an object.", param="text.format")
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError(
            "reasoning.effort must be a string or null.", param="reasoning.effort"
        )
    chat = schema.ChatRequest(
        messages=_messages(body),
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        timeout_s=body.timeout_s,
        cache_salt=body.cache_salt,
        response_format=text_format,
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=effort,
    )
    return await reply_to_chat(
        frontend,
        exchange,
        chat,
        partial(ResponsesFormat, body),
        "resp_",
        format_param="text.format",
    )


def _refuse_fields(body: schema.ResponsesRequest) -> None:
    if body.previous_response_id is not None:
        raise InvalidRequestError(
            "previous_response_id is not supported, because no response is stored: send the whole"
            " conversation as input.",
            param="previous_response_id",
        )
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(
                f"{name} is not supported, because nothing is stored: send the whole conversation"
                " as input.",
                param=name,
            )
    if body.background:
        raise InvalidRequestError("background is not supported: leave it out.", param="background")
    if body.truncation not in (None, "disabled"):
        raise InvalidRequestError("truncation must be 'disabled'.", param="truncation")


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Chat completions have the function one level below."""
    if tool.get("type") != "function":
        raise InvalidRequestError(
            f"tools[{index}] must be of type 'function'; this server runs no tools of its own.",
            param=f"tools[{index}]",
        )
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _messages(body: schema.ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add_item(messages, f"input[{index}]", item)
    return messages


def _add_item(messages: list[dict[str, Any]], path: str, item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            check_role(f"{path}.role", role)
            content = _text(f"{path}.content", item.get("content"))
            if role == "assistant":
                _open_assistant(messages)["content"] = content
            else:
                messages.append({"role": role, "content": content})
        case "reasoning":
            _open_assistant(messages)["reasoning_content"] = _text(
                f"{path}.content", item.get("content") or ""
            )
        case "function_call":
            name = item.get("name")
            if not isinstance(name, str):
                raise InvalidRequestError(
                    f"{path}.name must be a string: the function that was called.",
                    param=f"{path}.name",
                )
            arguments = item.get("arguments", "{}")
            if not isinstance(arguments, str):
                raise InvalidRequestError(
                    f"{path}.arguments must be a string of JSON.", param=f"{path}.arguments"
                )
            function = {"name": name, "arguments": arguments or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _open_assistant(messages, keeps_content=True).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            text = _text(f"{path}.output", item.get("output"))
            tool_call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": tool_call_id, "content": text})
        case kind:
            raise InvalidRequestError(
                f"{path}.type must be message, reasoning, function_call or function_call_output,"
                f" got {kind!r:.64}.",
                param=f"{path}.type",
            )


def _open_assistant(
    messages: list[dict[str, Any]], *, keeps_content: bool = False
) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last, unless it is complete."""
    last = messages[-1] if messages else {}
    is_complete = bool(last.get("tool_calls") or last.get("content")) and not keeps_content
    if last.get("role") != "assistant" or is_complete:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _text(path: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path} must be a string or an array of parts.", param=path)
    texts = []
    for i, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{path}[{i}] must be a part of text; this model takes no other kind.",
                param=f"{path}[{i}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)
