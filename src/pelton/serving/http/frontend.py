# SPDX-License-Identifier: Apache-2.0
"""What the handlers of one frontend share: the model's text side, the workers, and who is let
in."""

import hmac
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
from pelton.engine.grammar import GrammarCompiler
from pelton.serving.chat_template import ChatTemplate
from pelton.serving.http.metrics import Metrics
from pelton.serving.http.replies import Exchange
from pelton.serving.messages import WorkerInfo
from pelton.serving.parsers.formats import OutputFormat
from pelton.serving.placement import Placement
from pelton.serving.prompt_writer import PromptWriter
from pelton.serving.router.types import REPORT_DELAY_S, Policy, RouterConfig
from pelton.serving.template_process import TemplateProcess
from pelton.serving.tokenizer import Tokenizer
from pelton.serving.tracing import start_tracing
from pelton.serving.worker_pool import WorkerPool

_MAX_LOGGED_FIELDS = 1000
_log = logging.getLogger("pelton.serving")


class Frontend:
    def __init__(
        self,
        config: ServerConfig,
        model: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        *,
        number: int = 0,
        directory: str = "",
    ) -> None:
        """`number`: which of the server's frontends it is; `directory`: where the sockets of the
        server's processes lie."""
        self.number, self.directory = number, directory
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.template_process = TemplateProcess(tokenizer.special_tokens)
        self.output_format = OutputFormat(
            config.tool_parser, config.reasoning_parser, chat_template.source, tokenizer
        )
        self.prompt_writer = PromptWriter(chat_template, self.output_format)
        self.grammars = GrammarCompiler(tokenizer.vocabulary)
        self.served_name = config.served_model_name or model
        self.names = {self.served_name, model}
        self.created = int(time.time())
        self.metrics = Metrics()
        self.max_queue = -(-config.max_queue // config.frontends)
        """Its share of the requests that may be in flight."""
        self.workers = WorkerPool(
            config.roles,
            _make_router_config(config, number),
            config.max_worker_losses,
            min_remote_prefill=config.min_remote_prefill if config.prefill else None,
        )
        self.tracing = start_tracing(config.otlp_endpoint)
        self.is_draining = False
        self._bearer = f"Bearer {config.api_key}".encode() if config.api_key else b""
        self._logged_fields: set[str] = set()

    @property
    def info(self) -> WorkerInfo:
        """What any worker can do. Raises `UnavailableError` while none can take a request."""
        self._check_draining()
        info = self.workers.roster.info
        if info is None:
            raise UnavailableError("The model is being loaded; try again shortly.")
        return info

    def place(self, exchange: Exchange, requests: Sequence[GenerateRequest]) -> Placement:
        """For the requests of one reply; they are sent when it is started."""
        self._check_draining()
        return self.workers.place(requests, exchange.session, exchange.trace)

    def _check_draining(self) -> None:
        if self.is_draining:
            raise UnavailableError(
                "The server is shutting down; send the request elsewhere.", retry_after_s=5
            )

    def authorize(self, request: Request) -> None:
        if not self._bearer:
            return
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._bearer):
            raise AuthenticationError(
                "This server needs its API key in the header 'Authorization: Bearer KEY'."
            )

    def check_room(self, num_requests: int = 1, priority: int = 0) -> None:
        """Raises `OverloadedError` when so many more would be beyond `max_queue`. One may take the
        place of a request of lower priority that waits."""
        limit, num_live = self.max_queue, self.metrics.num_live
        if num_requests > limit:
            raise InvalidRequestError(
                f"prompt may hold at most {limit} prompts on this server, got {num_requests}.",
                param="prompt",
            )
        can_displace = num_requests == 1 and self.workers.gate.has_lower(priority)
        if num_live + num_requests > limit and not can_displace:
            raise OverloadedError(
                f"{num_live} requests are in flight, of at most {limit}; try again later."
            )

    @contextmanager
    def admit(self, num_requests: int, priority: int) -> Iterator[None]:
        """Counts requests as live inside, if there is room for them."""
        self.check_room(num_requests, priority)
        metrics = self.metrics
        if metrics.num_live + num_requests > self.max_queue:
            self.workers.gate.displace_last()
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
        self.workers.cancel_all(error)


def _make_router_config(config: ServerConfig, number: int) -> RouterConfig:
    # One frontend sends all requests there are, so a report can miss none of them but young ones,
    # which its own bookings count. Of several, each draws by a seed of its own.
    is_alone = config.frontends == 1
    return RouterConfig(
        policy=Policy(config.router),
        temperature=config.router_temperature,
        transfer_weight=config.router_transfer_weight,
        num_frontends=config.frontends,
        report_delay_s=0.0 if is_alone else REPORT_DELAY_S,
        seed=number,
    )
