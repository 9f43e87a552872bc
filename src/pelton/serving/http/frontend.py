# SPDX-License-Identifier: Apache-2.0
"""What the handlers of one frontend share: the model's text side, the worker, and who is let in."""

import asyncio
import hmac
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.requests import Request

from pelton.core.config import ServerConfig
from pelton.core.errors import (
    AuthenticationError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PeltonError,
    UnavailableError,
)
from pelton.core.request import GenerateRequest
from pelton.core.stats import EngineStats
from pelton.engine.grammar import GrammarCompiler
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.http.metrics import Metrics
from pelton.serving.http.replies import Exchange
from pelton.serving.messages import WorkerInfo
from pelton.serving.parsers.formats import OutputFormat
from pelton.serving.template_process import TemplateProcess
from pelton.serving.tokenizer import Tokenizer
from pelton.serving.worker_client import RequestStream

_MAX_LOGGED_FIELDS = 1000
_log = logging.getLogger("pelton.serving")


class WorkerPort(Protocol):
    """What a frontend needs of `WorkerClient`."""

    @property
    def info(self) -> WorkerInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def lost(self) -> asyncio.Event: ...
    def submit(self, *requests: GenerateRequest) -> RequestStream: ...
    def cancel_all(self, error: PeltonError) -> None: ...


class Frontend:
    def __init__(
        self, config: ServerConfig, model: str, tokenizer: Tokenizer, chat_template: ChatTemplate
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.template_process = TemplateProcess(tokenizer.special_tokens)
        self.output_format = OutputFormat(
            config.tool_parser, config.reasoning_parser, chat_template.source, tokenizer
        )
        self.grammars = GrammarCompiler(tokenizer.vocabulary)
        self.served_name = config.served_model_name or model
        self.names = {self.served_name, model}
        self.created = int(time.time())
        self.metrics = Metrics()
        self.is_draining = False
        self._worker: WorkerPort | None = None
        self._bearer = f"Bearer {config.api_key}".encode() if config.api_key else b""
        self._logged_fields: set[str] = set()

    def use_worker(self, worker: WorkerPort | None, generation: int) -> None:
        """Sends new requests to `worker`; None: there is none now."""
        self._worker = worker
        self.metrics.worker_generation = generation

    @property
    def worker(self) -> WorkerPort:
        """Raises `UnavailableError` while no worker can take a request."""
        if self.is_draining:
            raise UnavailableError(
                "The server is shutting down; send the request elsewhere.", retry_after_s=5
            )
        if self._worker is None or self._worker.lost.is_set():
            raise UnavailableError("The model is being loaded; try again shortly.")
        return self._worker

    @property
    def worker_info(self) -> WorkerInfo | None:
        """None while no worker has said it."""
        return self._worker.info if self._worker is not None else None

    def render_metrics(self) -> bytes:
        worker = self._worker
        self.metrics.is_worker_up = worker is not None and not worker.lost.is_set()
        if worker is not None:
            self.metrics.stats = worker.stats
        return self.metrics.render()

    def authorize(self, request: Request) -> None:
        if not self._bearer:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._bearer):
            raise AuthenticationError(
                "This server needs its API key in the header 'Authorization: Bearer KEY'."
            )

    def check_room(self, num_requests: int = 1) -> None:
        """Raises `OverloadedError` when so many more would be beyond `max_queue`."""
        limit, num_live = self.config.max_queue, self.metrics.num_live
        if num_requests > limit:
            raise InvalidRequestError(
                f"prompt may hold at most {limit} prompts on this server, got {num_requests}.",
                param="prompt",
            )
        if num_live + num_requests > limit:
            raise OverloadedError(
                f"{num_live} requests are in flight, of at most {limit}; try again later."
            )

    @contextmanager
    def admit(self, num_requests: int) -> Iterator[None]:
        """Counts requests as live inside, if there is room for them."""
        self.check_room(num_requests)
        metrics = self.metrics
        metrics.num_live += num_requests
        try:
            yield
        finally:
            metrics.num_live -= num_requests

    def check_model(self, name: str | None) -> None:
        if name and name not in self.names:
            raise ModelNotFoundError(
                f"There is no model {name!r} here; this server has {self.served_name!r}.",
                param="model",
            )

    def note_ignored(self, exchange: Exchange, fields: list[str]) -> None:
        """Names fields that the server does not know: in the reply, and once each in the log."""
        exchange.ignored_fields += fields
        for name in fields:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_FIELDS:
                self._logged_fields.add(name)
                path = exchange.request.url.path
                _log.warning("event=field_ignored field=%r path=%s", name[:64], path)

    def cancel_all(self, error: PeltonError) -> None:
        """Ends every request in flight with `error`."""
        if self._worker is not None:
            self._worker.cancel_all(error)
