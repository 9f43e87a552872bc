# SPDX-License-Identifier: Apache-2.0
"""What a parser makes of an assistant's output: reasoning, content, tool calls.

A parser is fed text as it comes, in pieces cut anywhere, and says what each piece adds. Joined,
what it says does not depend on the cuts. Text that may be the start of a marker is held back until
it is decided; `push(..., is_end=True)` releases it.

A call whose name has been told cannot be taken back from a stream. If its arguments then turn out
broken, a stream keeps what it has said; a whole reply shows the raw text as content instead (see
`MessageBuilder`). Either way `num_broken` counts it.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class ToolCallDelta:
    index: int
    name: str = ""
    """Told once, with the first delta of the call."""
    arguments: str = ""
    call_id: str = ""
    """Comes with the name."""


@dataclass(slots=True)
class MessageDelta:
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)

    def extend(self, other: "MessageDelta") -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        self.tool_calls += other.tool_calls

    def open_call(self, index: int, name: str) -> None:
        self.tool_calls.append(ToolCallDelta(index, name, "", "call_" + secrets.token_hex(12)))

    def add_arguments(self, index: int, text: str) -> None:
        if text:
            self.tool_calls.append(ToolCallDelta(index, "", text))


class Parser(Protocol):
    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        ...

    @property
    def num_broken(self) -> int:
        """Calls that did not parse."""
        ...

    def push(self, text: str, is_end: bool = False) -> MessageDelta: ...


class PlainParser:
    """Everything is content."""

    num_calls = num_broken = 0

    def push(self, text: str, is_end: bool = False) -> MessageDelta:
        return MessageDelta(content=text)


@dataclass(slots=True)
class ToolCall:
    call_id: str
    name: str
    arguments: str


class MessageBuilder:
    """A whole message, put together from deltas."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.tool_calls: list[ToolCall] = []

    def add(self, delta: MessageDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.tool_calls:
            if call.name:
                self.tool_calls.append(ToolCall(call.call_id, call.name, call.arguments))
            else:
                self.tool_calls[call.index].arguments += call.arguments


def held_length(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the start of one of `markers`."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        end = text[-length:]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The first occurrence of any of `markers`, the longest at one place; (-1, "") if none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker
