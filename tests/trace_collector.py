# SPDX-License-Identifier: Apache-2.0
"""A collector of traces on this machine: what OTLP over HTTP brings it, as plain values."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass(slots=True)
class Collector:
    url: str
    spans: list[CollectedSpan] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_values(resource_spans.resource.attributes))
            for scope in resource_spans.scope_spans:
                self.spans += map(_read_span, scope.spans)

    def named(self, name: str) -> list[CollectedSpan]:
        """In the order in which they began."""
        return sorted((s for s in self.spans if s.name == name), key=lambda span: span.start_ns)


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read_span(span: Any) -> CollectedSpan:
    return CollectedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
