# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: its routes, each a thin handler, and OpenAI-shaped errors everywhere.

FastAPI routes and documents; a route class of its own skips the parts that parse bodies and make
responses, because structs do both here (see `schema`). The routes that carry the load are called
without passing through the framework, whose layers would be walked once for every event.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import pelton
from pelton.core.errors import PeltonError
from pelton.serving.http import schema
from pelton.serving.http.admin import (
    AddBody,
    EndBody,
    answer_add,
    answer_drain,
    answer_list,
    answer_roll,
)
from pelton.serving.http.chat import answer_chat
from pelton.serving.http.completions import answer_completion
from pelton.serving.http.dashboard import PageReply, make_dashboard_data, read_page_files
from pelton.serving.http.frontend import Frontend
from pelton.serving.http.openapi import Documented, make_document
from pelton.serving.http.parse import BodyDecoder, BodyT, read_body
from pelton.serving.http.peers import collect_shares, render_metrics
from pelton.serving.http.replies import (
    TRACE_KEY,
    ErrorReply,
    Exchange,
    JSONReply,
    encode_json,
)
from pelton.serving.http.responses import answer_response
from pelton.serving.http.tokenization import answer_detokenize, answer_tokenize
from pelton.serving.tracing import Tracing

Handler = Callable[[Exchange], Awaitable[ASGIApp]]
Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Answer = Callable[[Frontend, Exchange, BodyT], Awaitable[ASGIApp]]
_log = logging.getLogger("pelton.serving")


class _NotFoundError(PeltonError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class _MethodNotAllowedError(PeltonError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class _Route(APIRoute):
    """Calls its endpoint with the `Exchange` and answers with whatever ASGI reply it returns."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


class Application:
    """The ASGI application: routes that were registered as direct, then FastAPI's."""

    def __init__(self, app: FastAPI, direct: dict[str, Endpoint], tracing: Tracing | None) -> None:
        self._app = app
        self._direct = direct
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._direct.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
        elif self._tracing is None:
            await self._answer(endpoint, scope, receive, send)
        else:
            await self._answer_traced(endpoint, scope, receive, send, self._tracing)

    async def _answer_traced(
        self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send, tracing: Tracing
    ) -> None:
        trace = tracing.begin(scope["method"], scope["path"], scope["headers"])
        if trace is None:
            await self._answer(endpoint, scope, receive, send)
            return
        scope[TRACE_KEY], status = trace, 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(endpoint, scope, receive, watched)
        finally:
            trace.end(status)

    async def _answer(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            reply = await endpoint(request)
        except Exception as error:
            await (await _answer_bug(request, error))(scope, receive, send)
            raise
        await reply(scope, receive, send)


def make_app(frontend: Frontend) -> Application:
    app = FastAPI(
        title="Pelton",
        version=pelton.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = _Route
    routes = _Routes(app, frontend)
    routes.post("/v1/chat/completions", schema.ChatRequest, answer_chat, is_direct=True)
    routes.post("/v1/completions", schema.CompletionRequest, answer_completion, is_direct=True)
    routes.post("/v1/responses", schema.ResponsesRequest, answer_response, is_direct=True)
    routes.post("/tokenize", schema.TokenizeRequest, answer_tokenize)
    routes.post("/detokenize", schema.DetokenizeRequest, answer_detokenize)
    routes.get("/tokenizer_info", routes.show_tokenizer)
    routes.get("/v1/models", routes.list_models)
    routes.get("/v1/models/{model:path}", routes.show_model)
    routes.get("/health", routes.show_health, is_open=True)
    routes.get("/ready", routes.show_ready, is_open=True)
    routes.get("/debug/route", routes.show_routes)
    routes.get("/metrics", routes.show_metrics)
    routes.get("/dashboard/data", routes.show_dashboard_data)
    routes.get("/admin/workers", partial(answer_list, frontend), is_documented=False)
    routes.post("/admin/workers", AddBody, answer_add, is_documented=False)
    routes.post("/admin/workers/roll", EndBody, answer_roll, is_documented=False)
    routes.post("/admin/workers/{worker}/drain", EndBody, answer_drain, is_documented=False)
    for path, (content, media_type) in read_page_files().items():
        routes.page(path, content, media_type)
    app.openapi = lambda: make_document(app, routes.documented)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_bug)
    return Application(app, routes.direct, frontend.tracing)


class _Routes:
    """Registers handlers, each wrapped with what all of them share."""

    def __init__(self, app: FastAPI, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend
        self.documented: list[Documented] = []
        self.direct: dict[str, Endpoint] = {}

    def post(
        self,
        path: str,
        body_type: type[BodyT],
        answer: Answer[BodyT],
        *,
        is_direct: bool = False,
        is_documented: bool = True,
    ) -> None:
        """What operators ask for is not in the API's document, which is for its clients."""
        frontend, decoder = self._frontend, BodyDecoder(body_type)

        async def handle(exchange: Exchange) -> ASGIApp:
            data = await read_body(
                exchange, frontend.config.max_body_bytes, frontend.config.request_timeout_s
            )
            exchange.num_body_bytes = len(data)
            body, unknown = decoder.decode(data)
            if unknown:
                frontend.note_ignored(exchange, unknown)
            return await answer(frontend, exchange, body)

        endpoint = self._add(path, "POST", handle, is_open=False)
        if is_direct:
            self.direct[path] = endpoint
        if is_documented:
            self.documented.append(Documented(path, "post", body_type))

    def get(
        self, path: str, handler: Handler, *, is_open: bool = False, is_documented: bool = True
    ) -> None:
        self._add(path, "GET", handler, is_open=is_open)
        if is_documented:
            self.documented.append(Documented(path.replace(":path", ""), "get", None))

    def page(self, path: str, content: bytes, media_type: bytes) -> None:
        """A file for browsers, which is no part of the API and not in its document."""

        async def show(exchange: Exchange) -> PageReply:
            return PageReply(exchange, content, media_type)

        self._add(path, "GET", show, is_open=True)

    def _add(self, path: str, method: str, handler: Handler, *, is_open: bool) -> Endpoint:
        frontend = self._frontend

        async def endpoint(request: Request) -> ASGIApp:
            exchange = Exchange.of(request)
            try:
                if not is_open:
                    frontend.authorize(request)
                return await handler(exchange)
            except PeltonError as error:
                if not is_open:  # a probe that asks whether the server is ready is no failure
                    frontend.metrics.errors[error.code or error.type] += 1
                return ErrorReply(exchange, error)

        methods = ["GET", "HEAD"] if method == "GET" else [method]
        self._app.add_api_route(path, endpoint, methods=methods, include_in_schema=False)
        return endpoint

    async def show_tokenizer(self, exchange: Exchange) -> JSONReply:
        tokens = self._frontend.tokenizer.special_tokens
        roles = ("bos_token", "eos_token", "unk_token", "pad_token")
        template = self._frontend.chat_template.source
        info = schema.TokenizerInfo(**{r: tokens.get(r) for r in roles}, chat_template=template)
        return JSONReply(exchange, encode_json(info))

    async def list_models(self, exchange: Exchange) -> JSONReply:
        reply = schema.ModelList("list", [self._model_card()])
        return JSONReply(exchange, encode_json(reply))

    async def show_model(self, exchange: Exchange) -> JSONReply:
        name = exchange.request.path_params["model"]
        if not name:
            raise _NotFoundError("A model is named behind /v1/models/; the path without it lists.")
        self._frontend.check_model(name)
        return JSONReply(exchange, encode_json(self._model_card()))

    async def show_health(self, exchange: Exchange) -> JSONReply:
        return JSONReply(exchange, encode_json(self._status("ok")))

    async def show_ready(self, exchange: Exchange) -> JSONReply:
        assert self._frontend.info  # raises while no worker takes requests
        return JSONReply(exchange, encode_json(self._status("ready")))

    async def show_routes(self, exchange: Exchange) -> JSONReply:
        cards = [card for share in await collect_shares(self._frontend) for card in share.routes]
        return JSONReply(exchange, encode_json(schema.RouteList("list", cards)))

    async def show_metrics(self, exchange: Exchange) -> JSONReply:
        reply = JSONReply(exchange, await render_metrics(self._frontend))
        reply.raw_headers[0] = (b"content-type", b"text/plain; version=1.0.0; charset=utf-8")
        return reply

    async def show_dashboard_data(self, exchange: Exchange) -> JSONReply:
        data = make_dashboard_data(self._frontend, await collect_shares(self._frontend))
        return JSONReply(exchange, encode_json(data))

    def _status(self, when_complete: str) -> schema.Status:
        roster = self._frontend.workers.roster
        num_workers, num_up = len(roster.states), roster.num_up
        status = when_complete if num_up == num_workers else "degraded"
        return schema.Status(status, num_workers, num_up)

    def _model_card(self) -> schema.ModelCard:
        frontend, info = self._frontend, self._frontend.workers.roster.info
        card = schema.ModelCard(frontend.served_name, "model", frontend.created, "pelton")
        if info is not None:
            card.max_model_len, card.vocab_size = info.max_model_len, info.vocab_size
            card.config, card.config_hash = info.config, info.config_hash
        return card


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException), error
    exchange, path = Exchange.of(request), request.url.path
    if error.status_code == 405:
        reply = ErrorReply(
            exchange, _MethodNotAllowedError(f"{request.method} is not allowed on {path}.")
        )
        matching = (r for r in request.app.routes if r.matches(request.scope)[0] is not Match.NONE)
        allowed = sorted({method for route in matching for method in route.methods})
        reply.raw_headers.append((b"allow", ", ".join(allowed).encode()))
        return reply
    return ErrorReply(exchange, _NotFoundError(f"There is no {path} here; see /openapi.json."))


async def _answer_bug(request: Request, error: Exception) -> Response:
    """A breach of an invariant: the server's log has the trace, the client learns the id."""
    exchange = Exchange.of(request)
    _log.error("event=internal_error request_id=%s error=%r", exchange.request_id, error)
    return ErrorReply(
        exchange, PeltonError(f"Internal error; the server's log has it: {exchange.request_id}.")
    )
