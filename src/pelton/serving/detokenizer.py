# SPDX-License-Identifier: Apache-2.0
"""Turns the tokens of one output into text as they arrive, and finds its stop strings.

What `push` returns, joined, is the text of the whole output: a character is held back until its
last byte is there, and text that may turn out to be the start of a stop string until it is decided.
The output continues its prompt: no space is dropped at its start, and a character whose first bytes
end the prompt is completed.
"""

import codecs
import re
from collections.abc import Sequence

from pelton.core.request import FinishReason, SamplingParams
from pelton.serving.tokenizer import Tokenizer

PREFILTER_CHARS = 8
"""How much of a stop string the quick test of a piece of text looks at."""

_new_decoder = codecs.getincrementaldecoder("utf-8")


class OutputDetokenizer:
    """One per choice. `stop_string` is set once the output ended at it; tokens after it are
    ignored, and whoever drives the engine must cancel the request."""

    __slots__ = (
        "_decode",
        "_held",
        "_includes_stop",
        "_matchers",
        "_may_concern_stop",
        "_min_tokens",
        "_table",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        table: Sequence[bytes] | None = None,
    ) -> None:
        """`table`: bytes by token id, in place of what `sampling` says of special tokens."""
        self.num_tokens = 0
        """Tokens of the output: of those pushed, the ones up to the end of a stop string."""
        self.stop_string: str | None = None
        if table is None:
            is_plain = sampling.skip_special_tokens
            table = tokenizer.plain_token_bytes if is_plain else tokenizer.token_bytes
        self._table = table
        self._decode = _new_decoder("replace").decode
        self._decode(_incomplete_end(tokenizer, prompt_token_ids))
        self._matchers = [_StopMatcher(stop) for stop in dict.fromkeys(sampling.stop)]
        self._may_concern_stop = _make_prefilter(sampling.stop).search
        self._held = ""
        """Decoded text that is the start of a stop string so far."""
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
    ) -> str:
        """The text that is certain now. Pass the reason with the last tokens (which may be none):
        it releases what is held. The text of an ending token is left out unless the request wants
        its stop in the output."""
        if self.stop_string is not None:
            return ""
        table = self._table
        if self._matchers:
            return self._push_with_stops(token_ids, finish_reason, stop_token_id)
        self.num_tokens += len(token_ids)
        if finish_reason is None:
            if len(token_ids) == 1:
                return self._decode(table[token_ids[0]])
            return self._decode(b"".join([table[token_id] for token_id in token_ids]))
        visible = self._visible(token_ids, finish_reason, stop_token_id)
        return self._decode(b"".join([table[token_id] for token_id in visible]), True)

    def _visible(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
    ) -> Sequence[int]:
        """Without the token that ended the output, where its text is not wanted."""
        is_ended_by_token = (
            finish_reason is FinishReason.STOP
            and stop_token_id is not None
            and len(token_ids) > 0
            and token_ids[-1] == stop_token_id
        )
        return token_ids[:-1] if is_ended_by_token and not self._includes_stop else token_ids

    def _push_with_stops(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
    ) -> str:
        visible = self._visible(token_ids, finish_reason, stop_token_id)
        released = []
        for token_id in visible:
            self.num_tokens += 1
            text = self._decode(self._table[token_id])
            if not self._held and not self._may_concern_stop(text):
                released.append(text)
                continue
            released.append(self._scan(text))
            if self.stop_string is not None:
                return "".join(released)
        self.num_tokens += len(token_ids) - len(visible)
        if finish_reason is not None:
            released.append(self._held + self._decode(b"", True))
            self._held = ""
        return "".join(released)

    def _scan(self, text: str) -> str:
        """Moves every stop string's matcher over `text`; returns what is no longer in doubt."""
        pending = self._held + text
        num_held = len(self._held)
        can_stop = self.num_tokens >= self._min_tokens
        for index, char in enumerate(text):
            complete = [m.stop for m in self._matchers if m.advance(char)]
            if complete and can_stop:
                self.stop_string = max(complete, key=len)
                end = num_held + index + 1
                self._held = ""
                return pending[: end if self._includes_stop else end - len(self.stop_string)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        released = len(pending) - num_held
        self._held = pending[released:]
        return pending[:released]


def _make_prefilter(stops: Sequence[str]) -> re.Pattern[str]:
    """Finds the start of a stop string inside a text, or as much of it as the text's end has."""
    alternatives = []
    for stop in stops:
        start = stop[:PREFILTER_CHARS]
        alternatives.append(re.escape(start))
        alternatives += [re.escape(start[:end]) + r"\Z" for end in range(1, len(start))]
    return re.compile("|".join(alternatives))


class _StopMatcher:
    """Knuth-Morris-Pratt: how much of `stop` the text ends with, one character at a time."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = [0]
        """By number of characters matched less one: the next shorter match to try."""
        length = 0
        for char in stop[1:]:
            while length and char != stop[length]:
                length = self._fallback[length - 1]
            length += char == stop[length]
            self._fallback.append(length)

    def advance(self, char: str) -> bool:
        """Whether `char` completes the stop string. The matcher is then ready for an overlapping
        one."""
        stop, length = self.stop, self.num_matched
        while length and char != stop[length]:
            length = self._fallback[length - 1]
        length += char == stop[length]
        is_complete = length == len(stop)
        self.num_matched = self._fallback[length - 1] if is_complete else length
        return is_complete


def _incomplete_end(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bytes:
    """The first bytes of a character that the prompt does not finish (up to 3), or nothing."""
    table = tokenizer.token_bytes
    # Ids that are no tokens are left to the engine, which refuses the request.
    end = b"".join([table[i] for i in prompt_token_ids[-3:] if 0 <= i < len(table)])[-3:]
    for length in range(1, len(end) + 1):
        byte = end[-length]
        if byte & 0xC0 != 0x80:  # not a continuation byte
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC2 else 1
            return end[-length:] if needed > length and byte < 0xF5 else b""
    return b""
