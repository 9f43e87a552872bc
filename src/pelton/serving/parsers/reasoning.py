# SPDX-License-Identifier: Apache-2.0
"""Reasoning between <think> and </think>, as DeepSeek-R1 and models after it write it."""

from pelton.serving.parsers.message import MessageDelta, Parser, held_length

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits reasoning off and leaves the rest to `inner`. Line breaks around the markers are
    dropped."""

    def __init__(self, inner: Parser, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with <think>, so the output starts inside the reasoning."""
        self._inner = inner
        self._held = ""
        self._state = "reasoning" if is_open else "start"
        self._is_fresh = True
        """Nothing but white space has come since the last marker."""

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    @property
    def num_broken(self) -> int:
        return self._inner.num_broken

    def push(self, text: str, is_end: bool = False) -> MessageDelta:
        delta = MessageDelta()
        text, self._held = self._held + text, ""
        if self._state == "start":
            stripped = text.lstrip()
            if stripped.startswith(OPEN):
                self._state, text = "reasoning", stripped[len(OPEN) :]
            elif OPEN.startswith(stripped) and not is_end:
                self._held = text
                return delta
            else:
                self._state, self._is_fresh = "content", False
        if self._state == "reasoning":
            text = self._reason(text, is_end, delta)
        if self._state == "content":
            if self._is_fresh:
                text = text.lstrip("\n")
                self._is_fresh = not text
            if text or is_end:
                delta.extend(self._inner.push(text, is_end))
        return delta

    def _reason(self, text: str, is_end: bool, delta: MessageDelta) -> str:
        """Returns what comes after the reasoning."""
        if self._is_fresh:
            text = text.lstrip("\n")
            self._is_fresh = not text
        at = text.find(CLOSE)
        if at < 0:
            num_held = 0 if is_end else held_length(text, (CLOSE,))
            cut = len(text) - num_held
            # Line breaks before the marker go with it.
            cut = len(text[:cut].rstrip("\n")) if not is_end else cut
            delta.reasoning += text[:cut]
            self._held = text[cut:]
            return ""
        delta.reasoning += text[:at].rstrip("\n")
        self._state, self._is_fresh = "content", True
        return text[at + len(CLOSE) :]
