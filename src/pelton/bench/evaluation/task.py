# SPDX-License-Identifier: Apache-2.0
"""Tasks of `pelton eval`: one JSON object a line, of one of three kinds.

    {"prompt": "2+2=", "answer": "4"}                       exact match; answer may be a list
    {"messages": [{"role": "user", ...}], "answer": "4"}    exact match, as a chat
    {"prompt": "2+2=", "choices": [" 3", " 4"], "answer": 1}   multiple choice by log-likelihood
    {"text": "Once upon a time ..."}                        perplexity

Kinds may be mixed; each is scored by itself.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.core.errors import ConfigError

_FIELDS = {
    frozenset({"prompt", "answer"}),
    frozenset({"messages", "answer"}),
    frozenset({"prompt", "choices", "answer"}),
    frozenset({"text"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch:
    line: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    """Instead of a prompt."""
    answers: tuple[str, ...]
    """Any of them is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoice:
    line: int
    prompt: str
    choices: tuple[str, ...]
    """Continuations of the prompt, spaces included."""
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    line: int
    text: str


Item = ExactMatch | MultipleChoice | Text


def read_task(path: Path) -> list[Item]:
    """Raises `ConfigError` that names the file and line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    items = list(_read_lines(path, data.removeprefix(codecs.BOM_UTF8).split(b"\n")))
    if not items:
        raise ConfigError(f"{path} holds no tasks: one JSON object a line is expected.")
    return items


def _read_lines(path: Path, lines: list[bytes]) -> Iterator[Item]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _read_item(number, _read_json(line))
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: {error}.") from error


def _read_json(line: bytes) -> Any:
    """Raises `ValueError` with what is wrong."""
    try:
        fields = json.loads(line.decode())
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half of a surrogate pair, which is no character") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error.msg} at character {error.pos + 1}") from error
    return fields


def _read_item(line: int, fields: Any) -> Item:
    """Raises `ValueError` with what is wrong."""
    if not isinstance(fields, dict):
        raise ValueError("an object is expected")
    known = {name: value for name, value in fields.items() if name in _KNOWN}
    if frozenset(known) not in _FIELDS:
        wanted = "; ".join(" and ".join(sorted(names)) for names in sorted(_FIELDS, key=sorted))
        raise ValueError(f"the fields must be one of these sets: {wanted}")
    if "text" in known:
        return Text(line=line, text=_text(known, "text"))
    if "choices" in known:
        return _read_choice(line, known)
    answer = known["answer"]
    answers = tuple(answer) if isinstance(answer, list) else (answer,)
    if not answers or not all(isinstance(item, str) for item in answers):
        raise ValueError("answer must be a text or a list of texts")
    messages = known.get("messages")
    if messages is None:
        prompt = _text(known, "prompt")
        return ExactMatch(line=line, prompt=prompt, messages=None, answers=answers)
    is_conversation = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not messages or not is_conversation:
        raise ValueError("messages must be a list of objects with role and content")
    return ExactMatch(line=line, prompt=None, messages=messages, answers=answers)


def _read_choice(line: int, fields: Mapping[str, Any]) -> MultipleChoice:
    choices, answer = fields["choices"], fields["answer"]
    is_list = isinstance(choices, list) and len(choices) >= 2
    if not is_list or not all(isinstance(item, str) and item for item in choices):
        raise ValueError("choices must be a list of two or more texts, none of them empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise ValueError(f"answer must be an index of choices, 0 to {len(choices) - 1}")
    return MultipleChoice(
        line=line, prompt=_text(fields, "prompt"), choices=tuple(choices), answer=answer
    )


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty")
    return value


_KNOWN = frozenset().union(*_FIELDS)
