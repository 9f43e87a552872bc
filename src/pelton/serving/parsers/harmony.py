# SPDX-License-Identifier: Apache-2.0
"""Reads an output in the harmony format: messages with a channel, told apart by special tokens.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The output continues a prompt that ends with <|start|>assistant. Analysis is reasoning; commentary
to a function is a tool call, in its header or in its channel; everything else is content. Models
also call functions from the analysis channel, though told not to: that is a call too, but a message
there to any other recipient (a built-in tool that nobody offers here) stays reasoning.
"""

import json
import re

from pelton.serving.parsers.message import MessageDelta, find_first, held_length

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
_BODY_ENDS = (END, RETURN, CALL, START)
_RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_MAX_HEADER_CHARS = 4096


class HarmonyParser:
    def __init__(self, *, takes_calls: bool = True, splits_reasoning: bool = True) -> None:
        self._takes_calls = takes_calls
        self._splits_reasoning = splits_reasoning
        self._held = ""
        self._in_header = True
        self._kind = ""
        """What the body is: "reasoning", "content" or "call"."""
        self._arguments: list[str] = []
        self.num_calls = 0
        self.num_broken = 0

    def push(self, text: str, is_end: bool = False) -> MessageDelta:
        delta = MessageDelta()
        self._held += text
        while (
            self._read_header(delta, is_end) if self._in_header else self._read_body(delta, is_end)
        ):
            pass
        return delta

    def _read_header(self, delta: MessageDelta, is_end: bool) -> bool:
        at, marker = find_first(self._held, (MESSAGE, END, RETURN, CALL))
        if at < 0:
            if len(self._held) > _MAX_HEADER_CHARS:
                self._begin("content", self._held)  # no harmony at all
                return True
            if is_end and self._held and not _is_header(self._held):
                delta.content += self._held
                self._held = ""
            return False
        header, rest = self._held[:at], self._held[at + len(marker) :]
        if marker != MESSAGE:  # a message without a body
            if not _is_header(header):
                delta.content += header
            self._held = rest
            return bool(rest)
        self._arguments = []
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        is_analysis = channel is not None and channel[1] == "analysis"
        is_call = recipient is not None and (not is_analysis or bool(recipient[1]))
        if recipient is not None and is_call and self._takes_calls:
            self._begin("call", rest)
            delta.open_call(self.num_calls, recipient[2])
        else:
            kind = "reasoning" if is_analysis and self._splits_reasoning else "content"
            self._begin(kind, rest)
        return True

    def _begin(self, kind: str, rest: str) -> None:
        self._kind, self._held, self._in_header = kind, rest, False

    def _read_body(self, delta: MessageDelta, is_end: bool) -> bool:
        at, marker = find_first(self._held, _BODY_ENDS)
        if at < 0:
            text = self._held
            cut = len(text) if is_end else len(text) - held_length(text, _BODY_ENDS)
            self._add(text[:cut], delta)
            self._held = text[cut:]
            if is_end:
                self._close()
            return False
        self._add(self._held[:at], delta)
        self._held = self._held[at + len(marker) :]
        self._close()
        self._in_header = True
        return bool(self._held)

    def _add(self, text: str, delta: MessageDelta) -> None:
        if self._kind == "call":
            self._arguments.append(text)
            delta.add_arguments(self.num_calls, text)
        elif self._kind == "reasoning":
            delta.reasoning += text
        else:
            delta.content += text

    def _close(self) -> None:
        if self._kind != "call":
            return
        self._kind = ""
        self.num_calls += 1
        self.num_broken += not _is_json("".join(self._arguments))


def _is_header(text: str) -> bool:
    """Whether a text before the first body can be (part of) a header."""
    return text.lstrip().startswith((CHANNEL, START, "to=", "assistant")) or CHANNEL in text


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
