# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, made from the structs that decode and encode the bodies."""

from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from pelton.serving.http import schema
from pelton.serving.http.dashboard import DashboardData

_REF = "#/components/schemas/{name}"
_REPLIES: dict[str, Any] = {
    "/v1/chat/completions": schema.ChatResponse,
    "/v1/completions": schema.CompletionResponse,
    "/v1/responses": schema.ResponsesReply,
    "/tokenize": schema.TokenizeResponse,
    "/detokenize": schema.DetokenizeResponse,
    "/tokenizer_info": schema.TokenizerInfo,
    "/v1/models": schema.ModelList,
    "/v1/models/{model}": schema.ModelCard,
    "/health": schema.Status,
    "/ready": schema.Status,
    "/debug/route": schema.RouteList,
    "/metrics": None,
    "/dashboard/data": DashboardData,
}
_STREAMS = {
    "/v1/chat/completions": "`data: ChatChunk`, then `data: [DONE]`; after an error its body is"
    " last.",
    "/v1/completions": "`data: CompletionResponse`, then `data: [DONE]`; after an error its body is"
    " last.",
    "/v1/responses": "the events of the Responses API by name; `response.completed`,"
    " `response.incomplete` or `error` is last.",
}
_SUMMARIES = {
    "/v1/chat/completions": "Continue a conversation.",
    "/v1/completions": "Continue one or more prompts.",
    "/v1/responses": "Answer by the Responses API, without memory.",
    "/tokenize": "A prompt's, or a conversation's, token ids.",
    "/detokenize": "The text of token ids.",
    "/tokenizer_info": "Special tokens and chat template: what clients that tokenise through the"
    " server ask for.",
    "/v1/models": "The model this server has.",
    "/v1/models/{model}": "One model by name.",
    "/health": "Whether the server lives.",
    "/ready": "Whether the server takes requests.",
    "/debug/route": "The newest routing decisions and their reasons.",
    "/metrics": "Counters and histograms in Prometheus' text format.",
    "/dashboard/data": "What the page at /dashboard shows.",
}
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model.",
    "408": "The request's deadline passed.",
    "413": "The body is larger than the server takes.",
    "429": "Too many requests are in flight; see Retry-After.",
    "500": "The server, or the model, failed.",
    "503": "No worker can take the request now; see Retry-After.",
}
_ERRORS_BY_METHOD = {"get": ("401", "404", "503"), "post": tuple(_ERRORS)}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
    },
}


@dataclass(frozen=True, slots=True)
class Documented:
    """A route of the document."""

    path: str
    method: str
    body_type: Any


def make_document(app: FastAPI, routes: list[Documented]) -> dict[str, Any]:
    types = {route.body_type for route in routes if route.body_type is not None}
    types |= {reply for reply in _REPLIES.values() if reply is not None}
    ordered = sorted(
        [*types, schema.ChatChunk, schema.ErrorResponse], key=lambda item: item.__name__
    )
    _, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    _say_what_types_cannot(components)
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": app.title, "version": app.version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _say_what_types_cannot(components: dict[str, Any]) -> None:
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    for name in ("ChatRequest", "TokenizeRequest"):
        messages = components[name]["properties"]["messages"]
        for option in messages.get("anyOf", [messages]):
            if option.get("type") == "array":
                option["items"] = _MESSAGE
                option["minItems"] = 1


def _operation(route: Documented) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": _SUMMARIES[route.path],
        "operationId": route.method + route.path.replace("/", "_").strip("{}"),
        "responses": {"200": _success(route.path)},
    }
    for status in _ERRORS_BY_METHOD[route.method]:
        operation["responses"][status] = {
            "description": _ERRORS[status],
            "content": _json(schema.ErrorResponse),
        }
    if route.body_type is not None:
        operation["requestBody"] = {"required": True, "content": _json(route.body_type)}
    if "{model}" in route.path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _success(path: str) -> dict[str, Any]:
    reply = _REPLIES[path]
    if reply is None:
        return {"description": "Text.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content = _json(reply)
    if path in _STREAMS:
        # `schema` would describe the stream to some readers and each event to others.
        content["text/event-stream"] = {
            "itemSchema": {
                "type": "object",
                "description": f"With `stream`: {_STREAMS[path]}",
                "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
                "required": ["data"],
            }
        }
    return {"description": "Done.", "content": content}


def _json(struct: Any) -> dict[str, Any]:
    reference = _REF.format(name=struct.__name__)
    return {"application/json": {"schema": {"$ref": reference}}}
