# SPDX-License-Identifier: Apache-2.0
"""Finds the end of a JSON object that arrives in pieces, without parsing it again for each.

Only nesting and strings are followed, so a text that is no JSON may pass; whoever needs to know
parses the whole object once it has ended.
"""


class ObjectScanner:
    """Fed characters of an object from its opening brace on."""

    __slots__ = ("_depth", "_in_string", "_is_escaped", "is_done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_done = False

    @property
    def is_in_string(self) -> bool:
        return self._in_string

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the object: all, unless it ends in them."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_done = True
                    return index + 1
        return len(text)
