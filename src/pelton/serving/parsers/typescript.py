# SPDX-License-Identifier: Apache-2.0
"""JSON schemas as TypeScript types: how tools are described in the harmony format."""

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
        if details.get("description"):
            lines += [f"// {line}" for line in str(details["description"]).splitlines()]
        nullable = " | null" if details.get("nullable") is True else ""
        default = ""
        if "default" in details:
            value = details["default"]
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            default = f" // default: {shown}"
        mark = "" if name in required else "?"
        lines.append(f"{name}{mark}: {render_type(field, depth + 1)}{nullable},{default}")
    return "\n".join([*lines, "}"])
