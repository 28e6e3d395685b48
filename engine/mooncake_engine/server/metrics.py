"""Prometheus metrics, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)

from mooncake_engine.messages import FinishReason, SpeculationStats
from mooncake_engine.server.clock import RequestClock
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
_HISTOGRAMS = {
    "first_token": ("vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S),
    "between_tokens": (
        "vllm:inter_token_latency_seconds",
        "Between one token and the next.",
        _BETWEEN_TOKENS_S,
    ),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Between tokens, one average per request.",
        _BETWEEN_TOKENS_S,
    ),
    "whole": ("vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE_REQUEST_S),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    "tokens": ("vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS),
    # by the names of an answer's stages
    "queue": ("vllm:request_queue_time_seconds", "Waiting for a place.", _WHOLE_REQUEST_S),
    "kv_transfer": (
        "mooncake:request_kv_transfer_time_seconds",
        "Loading a peer's KV.",
        _WHOLE_REQUEST_S,
    ),
    "prefill": (
        "vllm:request_prefill_time_seconds",
        "First step to first token.",
        _WHOLE_REQUEST_S,
    ),
    "decode": (
        "vllm:request_decode_time_seconds",
        "First token to last token.",
        _WHOLE_REQUEST_S,
    ),
}


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._label_values = (engine.config.model_name, "0")
        self.registry.register(_EngineCollector(engine, self._label_values))
        self._histograms = {
            name: self._histogram(metric, words, buckets)
            for name, (metric, words, buckets) in _HISTOGRAMS.items()
        }
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

    def advance(self, clock: RequestClock, update: TextUpdate, now: float) -> None:
        """An update of an answer has come at ``now`` (``time.monotonic``)."""
        is_first = clock.first_token is None
        gap = clock.advance(update, now)
        if gap is not None:
            self._observe("between_tokens", gap)
        elif is_first and clock.first_token is not None:
            self._observe("first_token", now - clock.started)

    def end(self, clock: RequestClock, now: float, otherwise: FinishReason) -> None:
        """An answer is over; ``otherwise`` is why, if it has not come to its own end."""
        self._by_reason[clock.finish or otherwise].inc()
        if clock.finish is None:
            return
        self._observe("whole", now - clock.started)
        self._observe("prompt_tokens", clock.num_prompt_tokens)
        self._observe("tokens", clock.num_tokens)
        for stage in clock.stages():
            self._observe(stage.name, stage.duration_s)
        if clock.num_tokens > 1 and clock.first_token and clock.last_token:
            decode_s = clock.last_token - clock.first_token
            self._observe("per_token", decode_s / (clock.num_tokens - 1))

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, words, _LABELS, registry=self.registry, buckets=buckets)
        return family.labels(*self._label_values)


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
        stats, facts = self._engine.stats(), self._engine.facts
        blocks = {"block_size": str(facts.block_size), "num_gpu_blocks": str(facts.num_kv_blocks)}
        yield InfoMetricFamily("vllm:cache_config", "The KV pool.", blocks)
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Requests in steps.", stats.num_running)
        num_queued = stats.num_waiting - stats.num_swapped
        yield gauge("vllm:num_requests_waiting", "Requests queued.", num_queued)
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
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)
        for name, value in sorted(stats.kv_transfer.items()):
            safe = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            yield gauge(f"mooncake:kv_transfer_{safe}", f"KV transfer: {name}.", value)

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        prefix, counter = "vllm:spec_decode_num", self._counter
        yield counter(f"{prefix}_drafts", "Drafts of some tokens each.", stats.num_drafts)
        yield counter(f"{prefix}_draft_tokens", "Tokens guessed.", stats.num_draft_tokens)
        yield counter(f"{prefix}_accepted_tokens", "Guesses kept.", stats.num_accepted_tokens)
        by_position = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Guesses kept, by place in their draft.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_at):
            by_position.add_metric((*self._label_values, str(position)), count)
        yield by_position

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, words, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, words: str, value: float) -> Metric:
        family = CounterMetricFamily(name, words, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family
