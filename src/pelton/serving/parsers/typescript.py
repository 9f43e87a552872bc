# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as TypeScript types: how tools are described in the harmony format.

What the published guide leaves open is as OpenAI's renderer, openai/harmony, writes it: titles,
examples, defaults, alternatives.
"""

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 32
_SIMPLE = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}


def render_type(schema: Any, depth: int = 0) -> str:
    """What a schema describes; `any` where it says nothing that a type can."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return "any"
    for key in ("oneOf", "anyOf"):
        if isinstance(schema.get(key), list):
            return " | ".join(render_type(option, depth + 1) for option in schema[key])
    if isinstance(schema.get("enum"), list):
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"], ensure_ascii=False)
    kind = schema.get("type")
    if isinstance(kind, list):
        types = [render_type({**schema, "type": item}, depth + 1) for item in kind]
        return " | ".join(types)
    if kind == "array":
        item = render_type(schema.get("items"), depth + 1)
        return f"({item})[]" if " | " in item else f"{item}[]"
    if kind == "object" or "properties" in schema:
        return _render_object(schema, depth)
    return _SIMPLE.get(str(kind), "any")


def _render_object(schema: Mapping[str, Any], depth: int) -> str:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return "object"
    required = schema.get("required") or []
    lines = ["{"]
    for name, field in properties.items():
        details = field if isinstance(field, Mapping) else {}
        mark = "" if name in required else "?"
        lines += _comments(details)
        if isinstance(details.get("oneOf"), list):
            if "default" in details:
                lines.append(f"// default: {_json(details['default'])}")
            options = [_render_option(option, depth + 1) for option in details["oneOf"]]
            lines += [f"{name}{mark}:", *options, ","]
            continue
        nullable = " | null" if details.get("nullable") is True else ""
        default = _default(details)
        lines.append(f"{name}{mark}: {render_type(field, depth + 1)}{nullable},{default}")
    return "\n".join([*lines, "}"])


def _comments(details: Mapping[str, Any]) -> list[str]:
    """Title, description and examples, above the field."""
    lines = []
    if details.get("title"):
        lines += [str(details["title"]), ""]
    if details.get("description"):
        lines += str(details["description"]).splitlines()
    examples = details.get("examples")
    if isinstance(examples, list) and examples:
        lines += ["Examples:", *(f"- {_json(example)}" for example in examples)]
    return [f"// {line}".rstrip() for line in lines]


def _render_option(option: Any, depth: int) -> str:
    """One of a field's alternatives, on a line of its own."""
    details = option if isinstance(option, Mapping) else {}
    words = [" ".join(str(details["description"]).split())] if details.get("description") else []
    if "default" in details:
        words.append(f"default: {_json(details['default'])}")
    comment = f" // {' '.join(words)}" if words else ""
    return f"    | {render_type(option, depth)}{comment}"


def _default(details: Mapping[str, Any]) -> str:
    """Behind the field. That of an enumeration is written without quotes."""
    if "default" not in details:
        return ""
    value = details["default"]
    is_bare = isinstance(value, str) and isinstance(details.get("enum"), list)
    return f" // default: {value if is_bare else _json(value)}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
