"""An OpenTelemetry collector on loopback: real OTLP over HTTP, kept in memory."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """The spans exported so far."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        # OTLP spans, and the resource attributes of their senders.
        self.spans: list[Any] = []
        self.resource: dict[str, Any] = {}
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes_of(resource_spans.resource)
            for scope_spans in resource_spans.scope_spans:
                self.spans += scope_spans.spans

    def named(self, name: str) -> list[Any]:
        """All spans of that name, oldest first."""
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def children(self, parent: Any) -> list[str]:
        """The names of this span's direct children, sorted."""
        return sorted(s.name for s in self.spans if s.parent_span_id == parent.span_id)


def attributes_of(span: Any) -> dict[str, Any]:
    """The attributes of a span or resource."""
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the end of the block."""
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            kept.take(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: tests read `spans`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
