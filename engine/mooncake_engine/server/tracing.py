"""OpenTelemetry spans of requests; only where ``--otlp-endpoint`` asks for them.

    chat m              the request here (server span), under the caller's: the proxy's, as a rule
    ├── queue           the wait for a place
    ├── kv_transfer     a peer's KV comes in
    ├── prefill         the prompt is computed, up to the first token
    └── decode          the tokens after it

Names follow the semantic conventions for GenAI where these have one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.messages import FinishReason
from mooncake_engine.server.clock import RequestClock, Stage
from mooncake_engine.server.jobs import Job

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_EXPORT_TIMEOUT_S = 5
_TRACES_PATH = "/v1/traces"


def load_tracing(endpoint: str, role: Role) -> Tracing:
    """Spans go to the collector at ``endpoint`` as OTLP over HTTP, from a thread of their own.

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
            "pip install 'mooncake-engine[otel]'"
        ) from exc
    url = endpoint.rstrip("/")
    if not url.endswith(_TRACES_PATH):
        url += _TRACES_PATH
    facts = {"service.name": "mooncake-engine", "mooncake.role": role.value}
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


class Tracing:
    """Makes the spans of one instance, each request's when it is over."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("mooncake_engine")

    def record(self, job: Job, clocks: Sequence[RequestClock], outcome: FinishReason) -> None:
        """The spans of a request that has just ended.

        Args:
            clocks: of its answers.
            outcome: of the answers that have not come to an end of their own.
        """
        to_ns = _ClockToEpoch()
        span = self._begin(job, to_ns(min(clock.started for clock in clocks)))
        for index, clock in enumerate(clocks):
            for stage in clock.stages():
                self._add(span, stage, index, to_ns)
        self._finish(span, clocks, outcome)
        span.end(to_ns(time.monotonic()))

    def close(self) -> None:
        """Send what is left; may take as long as the collector does not answer."""
        self._provider.shutdown()

    def _begin(self, job: Job, start_ns: int) -> Span:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = {} if job.trace_parent is None else {"traceparent": job.trace_parent}
        return self._tracer.start_span(
            f"{job.operation} {job.model}",
            TraceContextTextMapPropagator().extract(parent),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": job.operation,
                "gen_ai.request.model": job.model,
                "gen_ai.request.choice.count": job.sampling.n,
                "mooncake.request_id": job.request_id,
            },
            start_time=start_ns,
        )

    def _add(self, parent: Span, stage: Stage, index: int, to_ns: _ClockToEpoch) -> None:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            stage.name,
            set_span_in_context(parent),
            attributes={"gen_ai.choice.index": index},
            start_time=to_ns(stage.start),
        )
        span.end(to_ns(stage.end))

    def _finish(self, span: Span, clocks: Sequence[RequestClock], outcome: FinishReason) -> None:
        from opentelemetry.trace import StatusCode

        reasons = [(clock.finish or outcome).value for clock in clocks]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        num_prompt_tokens = clocks[0].num_prompt_tokens
        span.set_attribute("gen_ai.usage.input_tokens", num_prompt_tokens)
        num_tokens = sum(clock.num_tokens for clock in clocks)
        span.set_attribute("gen_ai.usage.output_tokens", num_tokens)
        if FinishReason.ERROR.value in reasons:
            span.set_status(StatusCode.ERROR)


class _ClockToEpoch:
    """From readings of ``time.monotonic`` to nanoseconds since 1970."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self, reading: float) -> int:
        return int((reading + self._offset) * 1e9)
