"""OpenTelemetry spans of requests, recorded only with ``--otlp-endpoint``.

    chat m              the request on this instance (server span); the parent is the caller's span,
    │                   normally the proxy's
    ├── queue           in the waiting queue
    ├── kv_transfer     loading a peer's KV
    ├── prefill         computing the prompt, up to the first token
    └── decode          the tokens after the first one

Names follow OpenTelemetry's semantic conventions for GenAI where these have one.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.messages import FinishReason
from mooncake_engine.server.request_context import RequestContext, RequestPhase

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_EXPORT_TIMEOUT_S = 5
_TRACES_PATH = "/v1/traces"


def load_tracing(endpoint: str, role: Role) -> Tracing:
    """Tracing that exports to the collector at ``endpoint`` by OTLP over HTTP, in its own thread.

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
    if not url.endswith(_TRACES_PATH):
        url += _TRACES_PATH
    attributes = {"service.name": "mooncake-engine", "mooncake.role": role.value}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


class Tracing:
    """Records the spans of one instance; each request's spans are created when it has finished."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mooncake_engine")

    def record(self, context: RequestContext, outcome: FinishReason) -> None:
        """Record the spans of a request that has just finished.

        Args:
            outcome: the finish reason of choices without one.
        """
        from opentelemetry.trace import StatusCode

        to_ns = _ClockToEpoch()
        stats = [choice.stats for choice in context.choices]
        span = self._begin(context, to_ns(min(one.started for one in stats)))
        for index, one in enumerate(stats):
            for phase in one.phases():
                self._add(span, phase, index, to_ns)
        reasons = [(one.finish or outcome).value for one in stats]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("gen_ai.usage.input_tokens", stats[0].num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", sum(one.num_tokens for one in stats))
        if {FinishReason.ERROR.value, FinishReason.TIMEOUT.value} & set(reasons):
            span.set_status(StatusCode.ERROR)
        span.end(to_ns(time.monotonic()))

    def close(self) -> None:
        """Export the remaining spans; may block while the collector does not respond."""
        self._provider.shutdown()

    def _begin(self, context: RequestContext, start_ns: int) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = {} if context.trace_parent is None else {"traceparent": context.trace_parent}
        return self._tracer.start_span(
            f"{context.operation} {context.model}",
            TraceContextTextMapPropagator().extract(parent),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": context.operation,
                "gen_ai.request.model": context.model,
                "gen_ai.request.choice.count": context.sampling.n,
                "mooncake.request_id": context.request_id,
            },
            start_time=start_ns,
        )

    def _add(self, parent: Span, phase: RequestPhase, index: int, to_ns: _ClockToEpoch) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            phase.name,
            set_span_in_context(parent),
            attributes={"gen_ai.choice.index": index},
            start_time=to_ns(phase.start),
        )
        span.end(to_ns(phase.end))


class _ClockToEpoch:
    """Converts readings of ``time.monotonic`` to nanoseconds of Unix time."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self, reading: float) -> int:
        return int((reading + self._offset) * 1e9)
