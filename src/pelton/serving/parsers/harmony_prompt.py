# SPDX-License-Identifier: Apache-2.0
"""Chat messages to the harmony format, which GPT-OSS was trained on.

A conversation starts with a system message (identity, dates, reasoning effort, channels) and a
developer message (instructions, tools as TypeScript types, response formats). Each further message
is <|start|>header<|message|>text<|end|>. Reasoning of earlier turns is left out; that of the turn
being worked on, between its tool calls, is kept. Format: OpenAI's published harmony guide.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from pelton.core.errors import InvalidRequestError
from pelton.serving.parsers.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START
from pelton.serving.parsers.typescript import render_type

EFFORTS = ("low", "medium", "high")
_IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
_CUTOFF = "2024-06"


def render_harmony(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    effort: str = "medium",
    response_schema: Any = None,
    add_generation_prompt: bool = True,
    today: date | None = None,
) -> str:
    """The prompt's text, special tokens written out. Raises `InvalidRequestError`."""
    if effort not in EFFORTS:
        raise InvalidRequestError(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r:.32}.",
            param="reasoning_effort",
        )
    instructions = []
    turns = list(messages)
    while turns and turns[0]["role"] in ("system", "developer"):
        instructions.append(_text(turns.pop(0)))
    parts = [_system(effort, bool(tools), today or date.today())]
    developer = _developer("\n\n".join(filter(None, instructions)), tools, response_schema)
    if developer:
        parts.append(_message("developer", developer))
    last_final = max((i for i, turn in enumerate(turns) if _is_final(turn)), default=-1)
    names: dict[str, str] = {}
    for index, turn in enumerate(turns):
        parts += _turn(turn, index, names, keeps_reasoning=index > last_final)
    if add_generation_prompt:
        parts.append(f"{START}assistant")
    return "".join(parts)


def _message(header: str, text: str, end: str = END) -> str:
    return f"{START}{header}{MESSAGE}{text}{end}"


def _system(effort: str, has_tools: bool, today: date) -> str:
    lines = [
        _IDENTITY,
        f"Knowledge cutoff: {_CUTOFF}",
        f"Current date: {today.isoformat()}",
        "",
        f"Reasoning: {effort}",
        "",
        "# Valid channels: analysis, commentary, final. "
        "Channel must be included for every message.",
    ]
    if has_tools:
        lines.append("Calls to these tools must go to the commentary channel: 'functions'.")
    return _message("system", "\n".join(lines))


def _developer(instructions: str, tools: Any, response_schema: Any) -> str:
    sections = []
    if instructions:
        sections.append(f"# Instructions\n\n{instructions}")
    if tools:
        sections.append(f"# Tools\n\n## functions\n\n{_namespace(tools)}")
    if response_schema is not None:
        schema = json.dumps(response_schema, ensure_ascii=False, separators=(",", ":"))
        sections.append(f"# Response Formats\n\n## response\n\n{schema}")
    return "\n\n".join(sections)


def _namespace(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = ["namespace functions {", ""]
    for tool in tools:
        function = tool.get("function", tool)
        description = function.get("description")
        if description:
            lines += [f"// {line}" for line in str(description).splitlines()]
        parameters = function.get("parameters")
        has_fields = isinstance(parameters, Mapping) and parameters.get("properties")
        argument = ""
        if has_fields:
            about = " ".join(str(parameters.get("description") or "").split())
            argument = f"_: // {about}\n" if about else "_: "
            argument += render_type(parameters)
        lines += [f"type {function['name']} = ({argument}) => any;", ""]
    return "\n".join([*lines, "} // namespace functions"])


def _turn(
    turn: Mapping[str, Any], index: int, names: dict[str, str], *, keeps_reasoning: bool
) -> list[str]:
    """`names`: tool call ids to the functions they called, filled as calls are met."""
    role = turn["role"]
    if role == "assistant":
        return _assistant(turn, names, keeps_reasoning)
    if role in ("tool", "function"):
        name = turn.get("name") or names.get(str(turn.get("tool_call_id")))
        if not name:
            raise InvalidRequestError(
                f"messages[{index}] answers no tool call before it: its tool_call_id is unknown.",
                param=f"messages[{index}].tool_call_id",
            )
        header = f"functions.{name} to=assistant{CHANNEL}commentary"
        return [_message(header, _text(turn))]
    return [_message("developer" if role == "system" else role, _text(turn))]


def _assistant(turn: Mapping[str, Any], names: dict[str, str], keeps_reasoning: bool) -> list[str]:
    parts = []
    reasoning = turn.get("reasoning_content") or turn.get("reasoning")
    if isinstance(reasoning, str) and keeps_reasoning:
        parts.append(_message(f"assistant{CHANNEL}analysis", reasoning))
    calls = turn.get("tool_calls") or []
    text = _text(turn)
    if text:
        channel = "commentary" if calls else "final"
        parts.append(_message(f"assistant{CHANNEL}{channel}", text))
    for call in calls:
        function = call["function"]
        names[str(call.get("id"))] = function["name"]
        header = f"assistant{CHANNEL}commentary to=functions.{function['name']} {CONSTRAIN}json"
        arguments = function.get("arguments") or "{}"
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        parts.append(_message(header, arguments, CALL))
    return parts


def _is_final(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "assistant" and not turn.get("tool_calls")


def _text(turn: Mapping[str, Any]) -> str:
    content = turn.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
