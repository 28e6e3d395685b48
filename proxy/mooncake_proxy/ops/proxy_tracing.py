"""OpenTelemetry spans of requests, enabled by `--otlp-endpoint`.

    chat m              the client's request (server span), child of the client's span if sent
    ├── queue           the wait in the admission queue, if any
    ├── prefill         P's leg with all its attempts
    │   └── attempt     one exchange with one instance (client span; its context is propagated)
    └── decode          D's leg; in the push flow concurrent with P's

Names follow the semantic conventions for GenAI and HTTP where these define one. Parent spans are
passed explicitly, because an attempt's header lines need its span anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mooncake_proxy import __version__
from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, ParsedRequest
from mooncake_proxy.errors import ConfigError, UpstreamError
from mooncake_proxy.http1.http_wire import Origin, header_lines

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_S = 5
TRACES_PATH = "/v1/traces"
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
OPERATIONS = {OpenAIEndpoint.COMPLETION: "text_completion", OpenAIEndpoint.CHAT: "chat"}


def load_tracing(endpoint: str) -> RequestTracing:
    """Create the tracer, which exports to `endpoint` as OTLP over HTTP from a thread of its own.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: {exc.name} is not installed; "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from exc
    url = endpoint.rstrip("/")
    if not url.endswith(TRACES_PATH):
        url += TRACES_PATH
    facts = {"service.name": "mooncake-proxy", "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return RequestTracing(provider)


class RequestTracing:
    """Creates the spans of one proxy process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mooncake_proxy", __version__)

    def begin(
        self,
        endpoint: OpenAIEndpoint,
        parsed: ParsedRequest,
        request_id: str,
        headers: Mapping[bytes, bytes],
    ) -> RequestTrace:
        """Start the span of a request, as a child of the client's span if it sent one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        sent = {
            name.decode(): headers[name].decode("latin-1")
            for name in CONTEXT_HEADERS
            if name in headers
        }
        operation = OPERATIONS[endpoint]
        facts = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": parsed.model,
            "gen_ai.request.max_tokens": parsed.token_limit,
            "gen_ai.request.choice.count": parsed.n,
            "http.request.method": "POST",
            "url.path": endpoint.path,
            "mooncake.request_id": request_id,
        }
        span = self._tracer.start_span(
            f"{operation} {parsed.model}" if parsed.model else operation,
            TraceContextTextMapPropagator().extract(sent),
            SpanKind.SERVER,
            {name: value for name, value in facts.items() if value is not None},
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Export the remaining spans. Blocks until the collector answers or times out."""
        self._provider.shutdown()


class RequestTrace:
    """The spans of one request."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    def note_decision(self, record: Mapping[str, Any]) -> None:
        """Add the conductor's decision as attributes, named by their path in the record."""
        for name, value in _leaves("mooncake.decision", record):
            self._span.set_attribute(name, value)

    def end(self, status: int, error: BaseException | None) -> None:
        """End the span of a request; `status` is 499 if the client has disconnected."""
        self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            _mark_failed(self._span, error)
        self._span.end()

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """Span of a part of the request: its wait in the queue, or a leg."""
        with self._child(self._span, name) as span:
            yield span

    @contextmanager
    def attempt(self, leg: Span, origin: Origin, number: int) -> Iterator[bytes]:
        """Span of one exchange with one instance. Yields the header lines with its context."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes: dict[str, str | int] = {
            "server.address": origin.host,
            "server.port": origin.port,
            "http.request.resend_count": number,
        }
        with self._child(leg, "attempt", kind=SpanKind.CLIENT, attributes=attributes) as span:
            carrier: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
            yield header_lines(carrier.items())

    @contextmanager
    def _child(self, parent: Span, name: str, **described: Any) -> Iterator[Span]:
        """A child span that ends with the block. `described` are arguments of `start_span`."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(name, set_span_in_context(parent), **described)
        try:
            yield span
        except BaseException as error:
            _mark_failed(span, error)
            raise
        finally:
            span.end()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yield (path, value) for all values inside that are valid span attributes."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}", inner)
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _leaves(f"{path}.{position}", inner)
    elif isinstance(value, str | int | float):
        yield path, value


def _mark_failed(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    kind = error.reason if isinstance(error, UpstreamError) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, str(error))
