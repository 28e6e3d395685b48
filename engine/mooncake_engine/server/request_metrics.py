"""Prometheus metrics of an API server, under vLLM's names where the meaning is the same.

Requests are counted here; the metrics of the engine are read from its snapshot at each scrape.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from mooncake_engine.messages import (
    LOCAL_COMPUTE,
    LOCAL_HIT,
    PROMPT_TOKEN_SOURCES,
    EngineInfo,
    EngineStats,
    ExpertLoad,
    FinishReason,
    RequestClass,
    SpeculationStats,
    StepSizes,
    WaitedSeconds,
)
from mooncake_engine.server.metric_cells import Counter, Histogram, MetricCells
from mooncake_engine.server.request_context import ChoiceStats, GeneratedChoice, RequestContext
from mooncake_engine.text.completion_output import EngineClient, TextUpdate
from mooncake_kv.connector import TRANSFER_GAUGES, TRANSFER_STATS_HELP
from mooncake_kv.pool.pool_events import KNOWN_KINDS, POOL_STATS_HELP, PoolStats
from mooncake_kv.store.chunk_store import StoreStats
from mooncake_kv.store.store_metrics import STORE_PREFIX, families

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
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_GAUGES = frozenset(
    {*TRANSFER_GAUGES, "loads_in_flight", "saves_in_flight"}
    | {"num_stores", "num_connected_stores"}
)
"""The statistics of connector and KVCache pool that are gauges; the others are counters."""
_HISTOGRAMS = {
    "first_token": (
        "vllm:time_to_first_token_seconds",
        "Arrival to the first token that this instance computed.",
        _FIRST_TOKEN_S,
    ),
    "between_tokens": (
        "vllm:inter_token_latency_seconds",
        "Time between consecutive tokens.",
        _BETWEEN_TOKENS_S,
    ),
    "per_token": (
        "vllm:request_time_per_output_token_seconds",
        "Mean time between tokens, per request.",
        _BETWEEN_TOKENS_S,
    ),
    "whole": ("vllm:e2e_request_latency_seconds", "Arrival to last token.", _WHOLE_REQUEST_S),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    "tokens": ("vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS),
    "computed": (
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens computed (not cached), per request.",
        _TOKENS,
    ),
    "max_tokens": ("vllm:request_params_max_tokens", "The request's max_tokens.", _TOKENS),
    "longest": (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of a prompt's longest choice.",
        _TOKENS,
    ),
    "n": ("vllm:request_params_n", "The request's n.", _CHOICES),
    "preemptions": (
        "vllm:request_num_preemptions",
        "Preemptions of a request.",
        _PREEMPTIONS,
    ),
    "inference": (
        "vllm:request_inference_time_seconds",
        "First step to last token.",
        _WHOLE_REQUEST_S,
    ),
    # keys are the names of RequestPhase
    "queue": ("vllm:request_queue_time_seconds", "Time in the waiting queue.", _WHOLE_REQUEST_S),
    "kv_transfer": (
        "mooncake:request_kv_transfer_time_seconds",
        "Loading KV from a peer or the KVCache pool, before the first step.",
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


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    """The latency objectives (SLO) by which answers are counted, in seconds; None is no objective.

    Args:
        ttft_s: time to the first token that this instance computed.
        tbt_s: time between tokens, which nine in ten gaps of an answer must meet.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None

    @classmethod
    def of_ms(cls, ttft_ms: float | None, tbt_ms: float | None) -> LatencyObjectives:
        """The objectives from option values in milliseconds."""
        return cls(
            None if ttft_ms is None else ttft_ms / 1000, None if tbt_ms is None else tbt_ms / 1000
        )

    def verdicts(self, stats: ChoiceStats) -> Iterator[tuple[str, bool]]:
        """For each configured objective, its name and whether a finished answer has met it."""
        is_whole = stats.finish in (FinishReason.STOP, FinishReason.LENGTH)
        first = stats.first_token_at
        # nothing to judge in a whole answer without a token of this instance
        if self.ttft_s is not None and not (is_whole and first is None):
            is_met = is_whole and first is not None and first - stats.started <= self.ttft_s
            yield "ttft", is_met
        if self.tbt_s is not None:
            yield "tbt", is_whole and 10 * stats.num_late_gaps <= stats.num_gaps


_METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "other")
_STATUSES = ("1xx", "2xx", "3xx", "4xx", "5xx")


class ServerMetrics:
    """The metrics of one server, in their own registry.

    Args:
        engine: the engine client whose snapshot is exported.
        objectives: the latency objectives by which answers are counted.
        paths: the paths whose responses are counted.
        cells: the memory in which API workers count together; None for a single process.
    """

    def __init__(
        self,
        engine: EngineClient,
        objectives: LatencyObjectives | None = None,
        paths: Sequence[str] = (),
        cells: MetricCells | None = None,
    ) -> None:
        self._objectives = objectives or LatencyObjectives()
        self._tbt_s = self._objectives.tbt_s
        self.registry = CollectorRegistry()
        # Requests are counted under engine 0, whichever data-parallel rank serves them.
        self._label_values = (engine.config.model_name, "0")
        labels, cells = (_LABELS, self._label_values), cells or MetricCells()
        self._histograms = {
            name: Histogram(metric, help_text, labels, buckets, cells)
            for name, (metric, help_text, buckets) in _HISTOGRAMS.items()
        }
        self._between_tokens = self._histograms["between_tokens"]
        self._gaps: list[float] = []  # inter-token gaps of the step that is being delivered
        reasons = [reason.value for reason in FinishReason]
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests by reason.",
            labels,
            {"finished_reason": reasons},
            cells,
            shows_zeros=True,
        )
        self._responses = Counter(
            "http_requests",
            "HTTP responses, by status class.",
            ((), ()),
            {"method": _METHODS, "handler": paths, "status": _STATUSES},
            cells,
        )
        self._objectives_met = Counter(
            "mooncake:slo_requests",
            "Choices by request class, objective and whether the objective was met.",
            labels,
            {
                "class": [kind.value for kind in RequestClass],
                "objective": ("ttft", "tbt"),
                "met": ("true", "false"),
            },
            cells,
        )
        self.registry.register(_EngineCollector(engine, engine.config.model_name))
        ProcessCollector(registry=self.registry)
        counters = (self._finished, self._responses, self._objectives_met)
        self.registry.register(_ServerCollector(tuple(self._histograms.values()), counters))

    def advance(self, stats: ChoiceStats, update: TextUpdate, now: float) -> None:
        """Count an update of a choice received at ``now`` (seconds of ``time.monotonic``)."""
        is_first = stats.first_token_at is None
        gap = stats.advance(update, now)
        if gap is not None:
            self._note_gap(stats, gap)
        elif is_first and stats.first_token_at is not None:
            self._observe("first_token", now - stats.started)

    def note_token(self, stats: ChoiceStats, now: float) -> None:
        """A faster ``advance`` for an update with one plain token that is not the choice's
        first."""
        gap = now - (stats.last_token_at or now)
        stats.last_token_at = now
        stats.num_tokens += 1
        stats.num_gaps += 1
        if self._tbt_s is not None and gap > self._tbt_s:
            stats.num_late_gaps += 1
        if not self._gaps:
            asyncio.get_running_loop().call_soon(self._count_gaps)
        self._gaps.append(gap)

    def _count_gaps(self) -> None:
        """Record all gaps of a step at once."""
        gaps, self._gaps = self._gaps, []
        self._between_tokens.observe_all(gaps)

    def _note_gap(self, stats: ChoiceStats, gap: float) -> None:
        self._between_tokens.observe(gap)
        stats.num_gaps += 1
        if self._tbt_s is not None and gap > self._tbt_s:
            stats.num_late_gaps += 1

    def end(self, context: RequestContext, now: float, otherwise: FinishReason) -> None:
        """Count a finished request; ``otherwise`` is the finish reason of choices without one."""
        for choice in context.choices:
            self._finished.inc((choice.stats.finish or otherwise).value)
            self._count_objectives(choice, otherwise)
            if choice.stats.finish is not None:
                self._end_choice(choice.stats, now)
                if choice.request.sampling.max_tokens is not None:
                    self._observe("max_tokens", choice.request.sampling.max_tokens)
        for group in context.choices_by_prompt:
            if all(choice.stats.finish is not None for choice in group):
                self._observe("n", context.sampling.n)
                self._observe("longest", max(choice.stats.num_tokens for choice in group))

    def _count_objectives(self, choice: GeneratedChoice, otherwise: FinishReason) -> None:
        """Count whether an answer met the objectives, unless its client disconnected."""
        if (choice.stats.finish or otherwise) is FinishReason.ABORT:
            return
        request_class = RequestClass.of(choice.request.priority).value
        for objective, is_met in self._objectives.verdicts(choice.stats):
            met = "true" if is_met else "false"
            self._objectives_met.inc(request_class, objective, met)

    def _end_choice(self, stats: ChoiceStats, now: float) -> None:
        self._observe("whole", now - stats.started)
        self._observe("prompt_tokens", stats.num_prompt_tokens)
        self._observe("computed", max(0, stats.num_prompt_tokens - stats.num_cached_tokens))
        self._observe("tokens", stats.num_tokens)
        if stats.times is not None:
            self._observe("preemptions", stats.times.num_preemptions)
        phases = stats.phases()
        for phase in phases:
            self._observe(phase.name, phase.duration_s)
        if phases and stats.times is not None and stats.times.scheduled_at is not None:
            self._observe("inference", phases[-1].end - stats.times.scheduled_at)
        num_tokens = stats.num_computed_tokens
        if num_tokens > 1 and stats.first_token_at and stats.last_token_at:
            decode_s = stats.last_token_at - stats.first_token_at
            self._observe("per_token", decode_s / (num_tokens - 1))

    def count_response(self, method: str, handler: str, status: int) -> None:
        """Count the status of an HTTP response; ``handler`` is the path of its route."""
        method = method if method in _METHODS else "other"
        self._responses.inc(method, handler, f"{status // 100}xx")

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


@dataclass(frozen=True, slots=True)
class _ServerCollector:
    """Collects the histograms and counters of this server for its registry."""

    histograms: Sequence[Histogram]
    counters: Sequence[Counter]

    def describe(self) -> list[Metric]:
        """Empty, so that registering this collector does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        yield from (histogram.collect() for histogram in self.histograms)
        yield from (counter.collect() for counter in self.counters)


class _EngineCollector:
    """Collects the engine's snapshot at each scrape."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> list[Metric]:
        """Empty, so that registering this collector does not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The current metrics of each data-parallel rank."""
        stats, info = self._engine.stats(), self._engine.info
        families: dict[str, Metric] = {}
        for number, part in enumerate(stats.by_dp_rank or (stats,)):
            # Each rank's expert load covers the tokens of all ranks, and all ranks share one store.
            if number == 0:
                part = replace(part, experts=stats.experts)
            else:
                part = replace(part, experts=None, pool_store=None)
            metrics = _StatsMetrics(info, (self._model, str(number)))
            for family in metrics.collect(part):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield from families.values()


class _StatsMetrics:
    """Turns a snapshot of one data-parallel rank into metrics.

    Args:
        info: the engine's static properties.
        label_values: the label values of the data-parallel rank.
    """

    def __init__(self, info: EngineInfo, label_values: tuple[str, ...]) -> None:
        self._info = info
        self._label_values = label_values

    def collect(self, stats: EngineStats) -> Iterator[Metric]:
        """The metrics of a snapshot."""
        info = self._info
        num_blocks = info.num_kv_blocks // info.dp_size
        pool = {"block_size": str(info.block_size), "num_gpu_blocks": str(num_blocks)}
        labels = dict(zip(_LABELS, self._label_values, strict=True))
        yield InfoMetricFamily("vllm:cache_config", "The KV cache.", {**labels, **pool})
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Requests running.", stats.num_running)
        num_queued = stats.num_waiting - stats.num_swapped
        yield gauge("vllm:num_requests_waiting", "Requests waiting.", num_queued)
        yield self._waiting(capacity=num_queued - stats.num_loading, deferred=stats.num_loading)
        yield gauge("vllm:num_requests_swapped", "Requests swapped out.", stats.num_swapped)
        yield gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_cache_usage)
        yield counter("vllm:num_preemptions", "Requests preempted.", stats.num_preemptions)
        yield counter("mooncake:num_swap_outs", "Preemptions by swap.", stats.num_swap_outs)
        yield counter(
            "mooncake:num_shared_blocks",
            "Blocks released because another block had the same content.",
            stats.num_shared_blocks,
        )
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        yield counter("vllm:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield from self._prompt_sources(stats)
        yield self._step_sizes(stats.step_sizes)
        yield self._kv_byte_seconds(stats.kv_byte_seconds)
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)
        for name, value in sorted(stats.kv_transfer.items()):
            safe = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            family = gauge if safe in _GAUGES else counter
            # a connector of another package may have other names
            text = TRANSFER_STATS_HELP.get(name, f"The connector's {name}.")
            yield family(f"mooncake:kv_transfer_{safe}", text, value)
        if stats.kv_pool is not None:
            yield from self._kv_pool(stats.kv_pool)
        if stats.pool_store is not None:
            yield from self._pool_store(stats.pool_store)
        if stats.experts is not None:
            yield from self._experts(stats.experts)
        if stats.waited_s:
            yield self._collective_waits(stats.waited_s)

    def _prompt_sources(self, stats: EngineStats) -> Iterator[Metric]:
        """Where prompts' KV came from. The external cache is asked about all tokens that are not in
        the prefix cache, if there is one: a connector or a KVCache pool."""
        found = dict.fromkeys(PROMPT_TOKEN_SOURCES, 0) | stats.prompt_tokens_by_source
        computed, local = found.pop(LOCAL_COMPUTE), found.pop(LOCAL_HIT)
        external = sum(found.values())
        yield self._by_source(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by source.",
            {LOCAL_COMPUTE: computed, LOCAL_HIT: local, "external_kv_transfer": external},
        )
        yield self._by_source(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens that were not computed, by what supplied them.",
            {"device": local, **found},
        )
        counter, has_external = self._counter, bool(stats.kv_transfer or stats.kv_pool)
        text = "Prompt tokens that were not computed."
        yield counter("vllm:prompt_tokens_cached", text, local + external)
        text = "Prompt tokens not in the prefix cache, if they may be loaded."
        queried = computed + external if has_external else 0
        yield counter("vllm:external_prefix_cache_queries", text, queried)
        text = "Prompt tokens that were loaded."
        yield counter("vllm:external_prefix_cache_hits", text, external)

    def _by_source(self, name: str, help_text: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=(*_LABELS, "source"))
        for source, count in counts.items():
            family.add_metric((*self._label_values, source), count)
        return family

    def _waiting(self, **counts: int) -> Metric:
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests waiting, for capacity or for a peer's KV (deferred).",
            labels=(*_LABELS, "reason"),
        )
        for reason, count in counts.items():
            family.add_metric((*self._label_values, reason), count)
        return family

    def _kv_byte_seconds(self, values: dict[str, float]) -> Metric:
        family = CounterMetricFamily(
            "mooncake:kv_byte_seconds",
            "Bytes of KV times the seconds for which they were held, by purpose.",
            labels=(*_LABELS, "held_for"),
        )
        for name, value in values.items():
            family.add_metric((*self._label_values, name), value)
        return family

    def _step_sizes(self, sizes: StepSizes) -> Metric:
        cumulative = [*accumulate(sizes.num_steps)]
        bounds = [*(f"{2.0**i}" for i in range(len(cumulative) - 1)), "+Inf"]
        family = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens per step.", labels=_LABELS
        )
        buckets = list(zip(bounds, cumulative, strict=True))
        family.add_metric(self._label_values, buckets, sizes.num_tokens)
        return family

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        prefix, counter = "vllm:spec_decode_num", self._counter
        yield counter(f"{prefix}_drafts", "Drafts, of one or more tokens each.", stats.num_drafts)
        yield counter(f"{prefix}_draft_tokens", "Draft tokens.", stats.num_draft_tokens)
        yield counter(
            f"{prefix}_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens
        )
        by_position = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in their draft.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(stats.accepted_at):
            by_position.add_metric((*self._label_values, str(position)), count)
        yield by_position

    def _kv_pool(self, stats: PoolStats) -> Iterator[Metric]:
        """One metric per field, with a label where the field is a mapping: its transport, or its
        tier, outcome or reason."""
        for field in dataclasses.fields(stats):
            name, value = f"mooncake:kv_pool_{field.name}", getattr(stats, field.name)
            text = POOL_STATS_HELP[field.name]
            if isinstance(value, dict):
                label = "transport" if field.name.endswith("_by_transport") else "kind"
                counts = CounterMetricFamily(name, text, labels=(*_LABELS, label))
                # from 0 on: Prometheus would not see the increase from nothing to the first count
                every = dict.fromkeys(KNOWN_KINDS.get(field.name, ()), 0) | value
                for kind, count in sorted(every.items()):
                    counts.add_metric((*self._label_values, kind), count)
                yield counts
            else:
                family = self._gauge if field.name in _GAUGES else self._counter
                yield family(name, text, value)
        text = "Share of the load time that could overlap with computation and did, 0 to 1."
        yield self._gauge("mooncake:kv_pool_overlap_ratio", text, stats.overlap_ratio)

    def _pool_store(self, stats: StoreStats) -> Iterator[Metric]:
        """The store's metrics, as ``mooncake-kv store`` exports them."""
        for found in families(stats):
            kinds = dict.fromkeys(label for labels in found.rows for label, _ in labels)
            is_counter = found.name.endswith("_total")
            metric = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = metric(STORE_PREFIX + found.name, found.help, labels=(*_LABELS, *kinds))
            for labels, value in found.rows.items():
                family.add_metric((*self._label_values, *(text for _, text in labels)), value)
            yield family

    def _experts(self, load: ExpertLoad) -> Iterator[Metric]:
        yield self._counter(
            "mooncake:expert_tokens",
            "Tokens routed to experts, counted once per expert and layer.",
            load.num_tokens,
        )
        yield self._counter(
            "mooncake:expert_rows_sent",
            "Hidden states sent by the first rank of each stage to experts of other ranks.",
            load.num_sent_rows,
        )
        yield self._gauge(
            "mooncake:expert_imbalance",
            "Tokens of the most loaded part over the mean of all, since the last placement.",
            load.imbalance,
        )
        yield self._counter(
            "mooncake:expert_placements",
            "Rebalancings of the expert placement by load.",
            load.num_placements,
        )
        yield self._counter(
            "mooncake:expert_moves",
            "Experts moved to driver ranks from other ranks by rebalancing, once per layer.",
            load.num_moved,
        )

    def _collective_waits(self, by_rank: Sequence[WaitedSeconds]) -> Metric:
        family = CounterMetricFamily(
            "mooncake:collective_wait_seconds",
            "Seconds that a rank's host waited for other ranks, by group and collective.",
            labels=(*_LABELS, "rank", "group", "collective"),
        )
        for rank, groups in enumerate(by_rank):
            for group, waited in groups.items():
                for collective, seconds in waited.items():
                    labels = (*self._label_values, str(rank), group, collective)
                    family.add_metric(labels, seconds)
        return family

    def _gauge(self, name: str, help_text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help_text, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, help_text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family
