"""OpenTelemetry spans of requests; only where `--otlp-endpoint` asks for them.

    chat m              the client's request (server span), under the client's own if it has one
    ├── queue           the wait for a place, if there was one
    ├── prefill         P's leg with all its attempts
    │   └── attempt     one exchange with one instance (client span; what the instance is told)
    └── decode          D's leg; in the push flow beside that of P

Names follow the semantic conventions for GenAI and HTTP where these have one. Every span is started
with its parent in hand: under a driver there is no context of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mooncake_proxy import __version__
from mooncake_proxy.errors import ConfigError, UpstreamError
from mooncake_proxy.http1.origin import Origin
from mooncake_proxy.http1.wire import header_lines
from mooncake_proxy.openai import Ask, Endpoint

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

EXPORT_TIMEOUT_S = 5
TRACES_PATH = "/v1/traces"
CONTEXT_HEADERS = (b"traceparent", b"tracestate")
OPERATIONS = {Endpoint.COMPLETION: "text_completion", Endpoint.CHAT: "chat"}


def load_tracing(endpoint: str) -> Tracing:
    """Spans go to the collector at `endpoint` as OTLP over HTTP, from a thread of their own.
    ConfigError where OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"--otlp-endpoint {endpoint}: {exc.name} is not installed; "
            "pip install mooncake-proxy[otel]"
        ) from exc
    url = endpoint.rstrip("/")
    if not url.endswith(TRACES_PATH):
        url += TRACES_PATH
    facts = {"service.name": "mooncake-proxy", "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


class Tracing:
    """Makes the spans of one proxy process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mooncake_proxy", __version__)

    def begin(
        self, endpoint: Endpoint, ask: Ask, request_id: str, headers: Mapping[bytes, bytes]
    ) -> Trace:
        """The span of a request, under the client's own where it sent one."""
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
            "gen_ai.request.model": ask.model,
            "gen_ai.request.max_tokens": ask.token_limit,
            "gen_ai.request.choice.count": ask.n,
            "http.request.method": "POST",
            "url.path": endpoint.path,
            "mooncake.request_id": request_id,
        }
        span = self._tracer.start_span(
            f"{operation} {ask.model}" if ask.model else operation,
            TraceContextTextMapPropagator().extract(sent),
            SpanKind.SERVER,
            {name: value for name, value in facts.items() if value is not None},
        )
        return Trace(self._tracer, span)

    def close(self) -> None:
        """Send what is left; may take as long as the collector does not answer."""
        self._provider.shutdown()


class Trace:
    """The spans of one request."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span

    def end(self, status: int, error: BaseException | None) -> None:
        """The request is answered; or its client is gone, `status` 499."""
        self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            _mark_failed(self._span, error)
        self._span.end()

    @contextmanager
    def stage(self, name: str) -> Iterator[Span]:
        """A part of the request: its wait, or a leg."""
        with self._child(self._span, name) as span:
            yield span

    @contextmanager
    def attempt(self, leg: Span, origin: Origin, number: int) -> Iterator[bytes]:
        """One exchange with one instance; gives the header lines that name its span."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        facts = {
            "server.address": origin.host,
            "server.port": origin.port,
            "http.request.resend_count": number,
        }
        with self._child(leg, "attempt", SpanKind.CLIENT, facts) as span:
            told: dict[str, str] = {}
            TraceContextTextMapPropagator().inject(told, set_span_in_context(span))
            yield header_lines(told.items())

    @contextmanager
    def _child(self, parent: Span, name: str, *kind_and_facts: Any) -> Iterator[Span]:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(name, set_span_in_context(parent), *kind_and_facts)
        try:
            yield span
        except BaseException as error:
            _mark_failed(span, error)
            raise
        finally:
            span.end()


def _mark_failed(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import StatusCode

    kind = error.reason if isinstance(error, UpstreamError) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, str(error))
