# SPDX-License-Identifier: Apache-2.0
"""Traces: one for each request to generate, sent to an OpenTelemetry collector (OTLP over HTTP).

    POST /v1/chat/completions       the exchange; its attributes are those of GenAI conventions
        tokenise
        admission                   until a worker had room
        route                       the decision and the scores
        worker                      sent until its last output, or until the worker was lost
        queue, kv_pull, ...         the worker's own account (`core.trace.Phase`)
        migration                   from the loss of a worker until another has the request

A thread of OpenTelemetry's sends what is done, from a queue that drops what it cannot hold: a
collector that is slow or gone costs no request anything. A server that is not told where to send
traces imports nothing of OpenTelemetry.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pelton
from pelton.core import env
from pelton.core.errors import ConfigError, PeltonError
from pelton.core.trace import Phase
from pelton.serving.router.booking import Booking

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""`gen_ai.operation.name` of the routes that are traced."""
_FLUSH_S = 2.0

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Tracing:
    """What makes and sends the traces of one frontend."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.version": pelton.__version__})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "pelton"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("pelton", pelton.__version__)

    def begin(
        self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]
    ) -> "Trace | None":
        """The trace of a request that arrives now, which the client's `traceparent` may be part of.
        None: the route has none, or the sampler wants none of this one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if path not in _OPERATIONS:
            return None
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        span = self._tracer.start_span(
            f"{method} {path}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                "http.request.method": method,
                "url.path": path,
                "gen_ai.operation.name": _OPERATIONS[path],
                "gen_ai.provider.name": "pelton",
            },
        )
        return Trace(self._tracer, span) if span.is_recording() else None

    async def close(self) -> None:
        """Sends what is done, for two seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await asyncio.to_thread(self._provider.force_flush)


def start_tracing(endpoint: str) -> Tracing | None:
    """`endpoint`: the collector's URL, where `/v1/traces` is added; empty: what OpenTelemetry's
    environment variables say. None: nowhere. Raises `ConfigError`."""
    wanted_by = "--otlp-endpoint"
    if not endpoint and env.otlp_endpoint():
        wanted_by = "OTEL_EXPORTER_OTLP_ENDPOINT"
    elif not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Traces ({wanted_by}) need the package {error.name}: pip install 'pelton[otel]'.",
            param="otlp_endpoint",
        ) from error
    # The library reads its own variables; a path is added to a base, never to a signal's URL.
    return Tracing(OTLPSpanExporter(endpoint=_traces_url(endpoint) if endpoint else None))


def _traces_url(endpoint: str) -> str:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"--otlp-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}.",
            param="otlp_endpoint",
        )
    return endpoint if url.path.endswith("/v1/traces") else endpoint.rstrip("/") + "/v1/traces"


class Trace:
    """Of one HTTP request."""

    def __init__(self, tracer: "Tracer", root: "Span") -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer = tracer
        self._root = root
        self._context = set_span_in_context(root)

    def describe(self, attributes: Attributes) -> None:
        self._root.set_attributes(attributes)

    def fail(self, error: PeltonError) -> None:
        """The reply, or its last event, is this error."""
        _fail(self._root, error)

    def start(self, name: str, attributes: Attributes, start_ns: int | None = None) -> "Span":
        return self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=start_ns
        )

    def add(self, name: str, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        """A part that is over."""
        self.start(name, attributes, start_ns).end(end_ns)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        span = self.start(name, {})
        try:
            yield
        except PeltonError as error:
            _fail(span, error)
            raise
        finally:
            span.end()

    def end(self, status: int) -> None:
        """`status`: of the HTTP response; 0: none was sent."""
        if status:
            self._root.set_attribute("http.response.status_code", status)
        self._root.end()


class RequestTrace:
    """Of one request to generate: where it waits, which worker has it, what that says of it."""

    def __init__(self, trace: Trace, request_id: str) -> None:
        self._trace = trace
        self._own: Attributes = {"gen_ai.response.id": request_id}
        self._worker: Span | None = None
        """While one has the request."""
        self._migration: Span | None = None
        """While none has, after one was lost."""
        self._worker_ids = ("", "")
        """Of the one that has the request, and of the one that computes its prompt."""
        self._last: dict[int, Phase] = {}
        """Of each choice, the newest of the worker that has the request."""

    def book(self, start_ns: int, bookings: Sequence[Booking]) -> None:
        """It has waited since `start_ns` for what is now booked."""
        now_ns, now_s = time.time_ns(), time.monotonic()
        booked_ns = [now_ns - round((now_s - b.booked_at_s) * 1e9) for b in bookings]
        self._trace.add("admission", start_ns, booked_ns[0], self._own)
        for booking, end_ns, began_ns in zip(
            bookings, [*booked_ns[1:], now_ns], booked_ns, strict=True
        ):
            decision = booking.decision
            attributes: dict[str, str | int] = {
                "pelton.route.for": "prefill" if booking is not bookings[0] else "request",
                "pelton.route.policy": decision.policy.value,
                "pelton.route.reason": decision.reason,
                "pelton.route.scores": decision.score_text,
                "pelton.worker.id": decision.worker_id,
            }
            if decision.cached_tokens is not None:
                attributes["pelton.route.cached_tokens"] = decision.cached_tokens
            self._trace.add("route", began_ns, end_ns, {**self._own, **attributes})

    def send(self, bookings: Sequence[Booking]) -> str:
        """It goes to a worker: the W3C trace context that goes with it."""
        worker, *prefill = [booking.worker_id for booking in bookings]
        self._worker_ids = worker, prefill[0] if prefill else worker
        attributes: dict[str, str | int] = {
            "pelton.worker.id": worker,
            "pelton.worker.generation": bookings[0].decision.generation,
        }
        if prefill:
            attributes["pelton.prefill_worker.id"] = prefill[0]
        if self._migration is not None:
            self._migration.set_attribute("pelton.worker.id", worker)
            self._migration.end()
            self._migration = None
        self._last.clear()
        self._worker = self._trace.start("worker", {**self._own, **attributes})
        context = self._worker.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def take(self, phases: Sequence[Phase]) -> None:
        """What the worker says that it did."""
        for phase in phases:
            self._add(phase)
            if not phase.is_remote:
                self._last[phase.index] = phase

    def leave(self) -> None:
        """No worker has it any more. One that was cut short, by the client, a stop string or its
        own end, has not said how long it decoded."""
        if self._worker is None:
            return
        now_ns = time.time_ns()
        for index, last in self._last.items():
            if last.next_name == "decode":
                self._add(Phase("decode", last.end_ns, now_ns, index=index))
        self._worker.end(now_ns)
        self._worker = None

    def lose(self, error: PeltonError) -> None:
        """Its worker is gone."""
        if self._worker is not None:
            _fail(self._worker, error)
        self.leave()
        self._migration = self._trace.start(
            "migration", {**self._own, "pelton.worker.lost": self._worker_ids[0]}
        )

    def end(self) -> None:
        self.leave()
        if self._migration is not None:
            self._migration.end()
            self._migration = None

    def _add(self, phase: Phase) -> None:
        attributes: dict[str, Any] = {
            **self._own,
            "pelton.worker.id": self._worker_ids[phase.is_remote],
            "pelton.choice.index": phase.index,
            **phase.attributes,
        }
        self._trace.add(phase.name, phase.start_ns, phase.end_ns, attributes)


def _fail(span: "Span", error: PeltonError) -> None:
    """What the client did wrong is, by convention, no error of a server's span."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", error.code or error.type)
    if error.status >= 500:
        span.set_status(StatusCode.ERROR, error.message)
