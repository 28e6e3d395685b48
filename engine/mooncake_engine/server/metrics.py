"""Prometheus metrics, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from mooncake_engine.messages import EngineRequest, FinishReason
from mooncake_engine.text.generation import Engine, TextUpdate

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_REQUEST_S = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._label_values = (engine.config.model_name, "0")
        self.registry.register(_EngineCollector(engine, self._label_values))
        self.first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.between_tokens_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Between one token and the next.", _BETWEEN_TOKENS_S
        )
        self.request_s = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE_REQUEST_S
        )
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self.generated_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS
        )
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._by_reason = {
            reason: self._finished.labels(*self._label_values, reason.value)
            for reason in FinishReason
        }

    def count_finished(self, reason: FinishReason) -> None:
        """One more request has ended."""
        self._by_reason[reason].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, words, _LABELS, registry=self.registry, buckets=buckets)
        return family.labels(*self._label_values)


class RequestClock:
    """Times one answer."""

    def __init__(self, metrics: ServerMetrics, request: EngineRequest) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_tokens = 0
        self._started = time.perf_counter()
        self._last_token: float | None = None
        self._finish: FinishReason | None = None

    def advance(self, update: TextUpdate, now: float) -> None:
        """Tokens have come at ``now`` (``time.perf_counter``)."""
        self._finish = update.finish
        if not update.token_ids:
            return
        if self._last_token is None:
            self._metrics.first_token_s.observe(now - self._started)
        else:
            self._metrics.between_tokens_s.observe(now - self._last_token)
        self._last_token = now
        self._num_tokens += len(update.token_ids)

    def end(self, now: float, otherwise: FinishReason) -> None:
        """The answer is over; ``otherwise`` is why, if it has not come to its own end."""
        self._metrics.count_finished(self._finish or otherwise)
        if self._finish is not None:
            self._metrics.request_s.observe(now - self._started)
            self._metrics.prompt_tokens.observe(self._num_prompt_tokens)
            self._metrics.generated_tokens.observe(self._num_tokens)


class _EngineCollector:
    """Reads the engine's snapshot whenever Prometheus asks."""

    def __init__(self, engine: Engine, label_values: tuple[str, ...]) -> None:
        self._engine = engine
        self._label_values = label_values

    def describe(self) -> list[Metric]:
        """Nothing to say before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics at this moment."""
        stats = self._engine.stats()
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Requests in steps.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests queued.", stats.num_waiting)
        yield gauge("vllm:num_requests_swapped", "KV in host memory.", stats.num_swapped)
        yield gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_cache_usage)
        yield counter("vllm:num_preemptions", "Requests preempted.", stats.num_preemptions)
        yield counter("mooncake:num_swap_outs", "Preemptions by swap.", stats.num_swap_outs)
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        yield counter("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        for name, value in sorted(stats.kv_transfer.items()):
            safe = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            yield gauge(f"mooncake:kv_transfer_{safe}", f"KV transfer: {name}.", value)

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, words, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        family = CounterMetricFamily(name, words, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family
