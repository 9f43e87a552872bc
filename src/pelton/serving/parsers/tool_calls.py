# SPDX-License-Identifier: Apache-2.0
"""Tool calls between markers, or as bare JSON: the formats of Hermes, DeepSeek and Llama 3.

    hermes     <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    llama3     {"name": "f", "parameters": {...}}; ...      perhaps after <|python_tag|>
    deepseek   begin(calls) begin(call) function sep f, a fenced {...}, end(call) ... end(calls)
               begin(calls) begin(call) f sep {...} end(call) ... end(calls)      since V3.1

All share one machine: content up to an opening marker, a head that gives the name, arguments that
are a JSON object, and what closes the call. A call that is one JSON object may have its keys in any
order, as Hermes 2 Pro writes the arguments first and Llama a type; it is then told at its end. A
head that does not parse is content.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from pelton.serving.parsers.json_scan import ObjectScanner
from pelton.serving.parsers.message import MessageDelta, find_first, held_length

_STRING = r'"((?:[^"\\]|\\.)*)"'
_JSON_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.S
)
_FIRST_KEYS = tuple(
    f'{{"{key}"' for key in ("name", "arguments", "parameters", "type", "function", "id")
)
_MAX_HEAD_CHARS = 4096
_MAX_HELD_CHARS = 2**16
"""Of a call whose name does not come first."""
_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How one family of models writes calls."""

    open: tuple[str, ...]
    """Markers before a call's head."""
    close: str
    """What must follow the arguments, white space aside; empty: nothing."""
    head: re.Pattern[str]
    """Group 1 is the name, in JSON's escapes if `is_json`; the arguments follow."""
    is_json: bool
    """The head opens an object that is closed after the arguments."""
    between: str
    """Characters between calls that are no content."""
    noise: tuple[str, ...] = ()
    """Markers around calls that mean nothing by themselves."""
    is_bare: bool = False
    """A call may also start without a marker, where the output or another call's end is."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must reach the parser although they may be special tokens."""
        close = (self.close,) if self.close.startswith("<") else ()
        return (*self.open, *close, *self.noise)


HERMES = CallFormat(("<tool_call>",), "</tool_call>", _JSON_HEAD, True, " \n\r\t")
LLAMA3 = CallFormat(
    ("<|python_tag|>",), "", _JSON_HEAD, True, "; \n\r\t", ("<|eom_id|>",), is_bare=True
)
DEEPSEEK = CallFormat(
    (_CALL_BEGIN,),
    _CALL_END,
    re.compile(
        rf"(?:function{_SEPARATOR}([^\n{{]+)\n```(?:json)?\s*|(\S[^\n{{]*?){_SEPARATOR}\s*)(?=\{{)"
    ),
    False,
    " \n\r\t",
    (_CALLS_BEGIN, _CALLS_END, _SEPARATOR),
)


class ToolCallParser:
    """One output. `names`: the tools there are; a bare object is a call only to one of them."""

    def __init__(self, call_format: CallFormat, names: Collection[str]) -> None:
        self._format = call_format
        self._names = names
        self._held = ""
        self._state = "bare" if call_format.is_bare else "content"
        self._opening = ""
        """The marker that began the call whose head is being read."""
        self._scanner = ObjectScanner()
        self._num_scanned = 0
        """Characters of a head that `_scanner` has seen."""
        self._arguments: list[str] = []
        self._is_after_call = False
        self.num_calls = 0
        self.num_broken = 0

    def push(self, text: str, is_end: bool = False) -> MessageDelta:
        delta = MessageDelta()
        self._held += text
        steps = {
            "content": self._read_content,
            "bare": self._read_bare,
            "head": self._read_head,
            "arguments": self._read_arguments,
            "close": self._read_close,
        }
        while steps[self._state](delta, is_end):
            pass
        if is_end and self._state in ("arguments", "close"):
            self.num_broken += 1
        return delta

    def _emit(self, text: str, delta: MessageDelta) -> None:
        """Content; white space between calls and their markers is none."""
        if self._is_after_call:
            text = text.lstrip(self._format.between)
            self._is_after_call = not text
        delta.content += text

    def _read_content(self, delta: MessageDelta, is_end: bool) -> bool:
        markers = (*self._format.open, *self._format.noise)
        at, marker = find_first(self._held, markers)
        if at < 0:
            text = self._held
            cut = len(text) if is_end else len(text) - held_length(text, markers)
            if not is_end:  # white space before a marker goes with it
                cut = len(text[:cut].rstrip())
            self._emit(text[:cut], delta)
            self._held = text[cut:]
            return False
        self._emit(self._held[:at].rstrip(), delta)
        self._held = self._held[at + len(marker) :]
        if marker in self._format.open:
            self._start_head(marker)
        else:
            self._is_after_call = True
        return True

    def _read_bare(self, delta: MessageDelta, is_end: bool) -> bool:
        """Where a call may start without a marker."""
        text = self._held.lstrip(self._format.between)
        if not text and not is_end:
            return False
        if text.startswith("{"):
            self._start_head("")
        else:
            self._state = "content"
        return True

    def _start_head(self, opening: str) -> None:
        self._state, self._opening = "head", opening
        self._scanner, self._num_scanned = ObjectScanner(), 0

    def _read_head(self, delta: MessageDelta, is_end: bool) -> bool:
        between = self._format.between if not self._opening else None
        skipped = len(self._held) - len(self._held.lstrip(between))
        text, close = self._held[: skipped + _MAX_HEAD_CHARS], self._format.close
        end = text.find(close) if close and not self._format.is_json else -1
        match = self._format.head.match(text[:end] if end >= 0 else text, skipped)
        if match is not None:
            name = _unescape(next(filter(None, match.groups()), ""), self._format.is_json)
            if not self._open_call(name, delta):
                return self._give_up(delta)
            self._held = self._held[match.end() :]
            self._state, self._scanner, self._arguments = "arguments", ObjectScanner(), []
            return True
        if self._format.is_json:
            return self._read_object(skipped, delta, is_end)
        if is_end or end >= 0 or len(text) >= _MAX_HEAD_CHARS:
            return self._give_up(delta)
        return False

    def _open_call(self, name: str, delta: MessageDelta) -> bool:
        if not name or (not self._opening and name not in self._names):
            return False
        delta.open_call(self.num_calls, name)
        return True

    def _read_object(self, start: int, delta: MessageDelta, is_end: bool) -> bool:
        """A head that begins at `start` and is not of the common order: all of the call's object
        is awaited. Released early where it can be none."""
        begins = re.sub(r"\s+", "", self._held[start : start + 40])
        if not any(key.startswith(begins) or begins.startswith(key) for key in _FIRST_KEYS):
            return self._give_up(delta)
        self._num_scanned = max(self._num_scanned, start)
        is_whole = self._scan_object()
        if not self._scanner.is_done:
            is_hopeless = is_whole or is_end or len(self._held) > _MAX_HELD_CHARS
            return self._give_up(delta) if is_hopeless else False
        name, arguments = _read_call(self._held[start : self._num_scanned])
        if not self._open_call(name, delta):
            return self._give_up(delta)
        delta.add_arguments(self.num_calls, arguments)
        self._arguments = [arguments]
        self._held = self._held[self._num_scanned - 1 :]  # its brace closes the call
        self._state = "close"
        return True

    def _scan_object(self) -> bool:
        """Whether the object ends here, or can no more. What closes a call may stand in a string
        of its arguments."""
        close, scanner = self._format.close, self._scanner
        while not scanner.is_done:
            first = max(0, self._num_scanned - len(close) + 1)
            at = self._held.find(close, first) if close else -1
            stop = len(self._held) if at < 0 else max(at, self._num_scanned)
            self._num_scanned += scanner.feed(self._held[self._num_scanned : stop])
            if scanner.is_done or at < 0:
                break
            if not scanner.is_in_string:
                return True
            end = at + len(close)
            scanner.feed(self._held[self._num_scanned : end])
            self._num_scanned = end
        return scanner.is_done

    def _give_up(self, delta: MessageDelta) -> bool:
        """The head is none: its marker is content, and the rest is read as content."""
        self.num_broken += bool(self._opening)
        if self._opening:
            self._emit(self._opening, delta)
        self._state = "content"
        return True

    def _read_arguments(self, delta: MessageDelta, is_end: bool) -> bool:
        size = self._scanner.feed(self._held)
        piece, self._held = self._held[:size], self._held[size:]
        self._arguments.append(piece)
        delta.add_arguments(self.num_calls, piece)
        if not self._scanner.is_done:
            return False
        self._state = "close"
        return True

    def _read_close(self, delta: MessageDelta, is_end: bool) -> bool:
        text = self._held.lstrip()
        closers = ["}"] if self._format.is_json else ["```", ""]
        for closer in closers:
            if closer and closer.startswith(text) and len(text) < len(closer) and not is_end:
                return False  # not decided yet
            if text.startswith(closer):
                text = text[len(closer) :]
                break
        else:
            return self._break_off(delta)
        close = self._format.close
        rest = text.lstrip() if close else text
        if close and len(rest) < len(close) and close.startswith(rest) and not is_end:
            return False
        if close and not rest.startswith(close) and rest:
            return self._break_off(delta)
        if not _is_object("".join(self._arguments)):
            self._held = rest[len(close) :]
            return self._break_off(delta)
        self._held = rest[len(close) :]
        self._end_call()
        return bool(self._held)

    def _break_off(self, delta: MessageDelta) -> bool:
        self.num_broken += 1
        self._end_call()
        return bool(self._held)

    def _end_call(self) -> None:
        self.num_calls += 1
        self._is_after_call = True
        self._state = "bare" if self._format.is_bare else "content"


def _unescape(name: str, is_json: bool) -> str:
    if not is_json:
        return name.strip()
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return ""


def _read_call(text: str) -> tuple[str, str]:
    """Name and arguments of a whole call; no name if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    if isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get("name", call.get("function"))
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str) and _is_object(arguments):  # written as a string of JSON
        return (name, arguments) if isinstance(name, str) else ("", "")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", ""
    return name, json.dumps(arguments, ensure_ascii=False)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
