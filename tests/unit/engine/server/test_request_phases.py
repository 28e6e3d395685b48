"""The phases of a request, for metrics and traces."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.asgi import AsgiClient
from support.fake_engine import FakeEngine

from mooncake_engine.messages import FinishReason, RequestTimes
from mooncake_engine.server.app import create_app
from mooncake_engine.server.request_context import ChoiceStats
from mooncake_engine.server.request_metrics import LatencyObjectives
from mooncake_engine.server.request_tracing import Tracing
from mooncake_engine.text.completion_output import TextUpdate
from mooncake_engine.text.tokenizer import Tokenizer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("times", "tokens_at", "phases"),
    [
        (None, [3.0], []),
        (RequestTimes(1.0), [], []),
        (RequestTimes(1.0, scheduled_at=2.0), [], [("queue", 1.0, 2.0)]),
        (
            RequestTimes(1.0, scheduled_at=2.0),
            [3.0],
            [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0)],
        ),
        (
            RequestTimes(1.0, scheduled_at=2.0),
            [3.0, 5.0],
            [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0), ("decode", 3.0, 5.0)],
        ),
        (
            RequestTimes(1.0, 1.5, 2.0, 2.5, has_peer_token=True),
            [1.0, 4.0],
            [("queue", 1.0, 1.5), ("kv_transfer", 1.5, 2.0), ("decode", 2.5, 4.0)],
        ),
        (  # the beginning was loaded, from the KVCache pool, and the rest computed here
            RequestTimes(1.0, 1.5, 2.0, 2.5),
            [3.0, 4.0],
            [
                ("queue", 1.0, 1.5),
                ("kv_transfer", 1.5, 2.0),
                ("prefill", 2.5, 3.0),
                ("decode", 3.0, 4.0),
            ],
        ),
        (  # the load failed: the prompt was computed here
            RequestTimes(1.0, 1.5, None, 2.5),
            [3.0],
            [("queue", 1.0, 1.5), ("prefill", 2.5, 3.0)],
        ),
        (  # the same after the peer's first token, which the client got before that
            RequestTimes(1.0, 1.5, None, 2.5, has_peer_token=True),
            [1.0, 4.0],
            [("queue", 1.0, 1.5), ("decode", 2.5, 4.0)],
        ),
    ],
)
def test_phases_follow_from_the_timestamps(
    times: RequestTimes | None, tokens_at: list[float], phases: list[Any]
) -> None:
    stats = ChoiceStats(7)
    for at in tokens_at:
        stats.advance(TextUpdate("x", (1,)), at)
    stats.advance(TextUpdate("", finish=FinishReason.LENGTH, times=times), 9.0)
    assert [(phase.name, phase.start, phase.end) for phase in stats.phases()] == phases


def test_gaps_begin_with_the_second_token() -> None:
    stats = ChoiceStats(7)
    assert stats.advance(TextUpdate("", prompt_logprobs=()), 1.0) is None
    assert stats.advance(TextUpdate("a", (1,)), 2.0) is None
    assert stats.advance(TextUpdate("b", (2, 3)), 2.5) == 0.5
    assert (stats.first_token_at, stats.last_token_at, stats.num_tokens) == (2.0, 2.5, 3)


PEER_TIMES = RequestTimes(1.0, 1.5, 2.0, 2.5, has_peer_token=True)


def test_a_peers_token_is_not_the_first_one() -> None:
    """It may be reported before the KV has arrived; the wait for that is no gap between tokens."""
    stats = ChoiceStats(7)
    assert stats.advance(TextUpdate("a", (1,), times=PEER_TIMES), 1.0) is None
    assert (stats.first_token_at, stats.num_tokens, stats.num_computed_tokens) == (None, 1, 0)
    assert stats.advance(TextUpdate("b", (2,), times=PEER_TIMES), 4.0) is None
    assert (stats.first_token_at, stats.num_tokens, stats.num_computed_tokens) == (4.0, 2, 1)
    assert stats.advance(TextUpdate("c", (3,)), 4.5) == 0.5


def test_a_peers_token_in_one_update_with_the_next() -> None:
    stats = ChoiceStats(7)
    assert stats.advance(TextUpdate("ab", (1, 2), times=PEER_TIMES), 4.0) is None
    assert (stats.first_token_at, stats.num_computed_tokens) == (4.0, 1)


@pytest.mark.parametrize(
    ("times_at", "verdicts"),
    [
        ([0.0], []),  # the peer's token was the whole answer
        ([0.0, 0.4], [("ttft", True)]),
        ([0.0, 0.6], [("ttft", False)]),
    ],
)
def test_the_objective_of_the_first_token_covers_the_transfer(
    times_at: list[float], verdicts: list[tuple[str, bool]]
) -> None:
    stats = ChoiceStats(7)
    for at in times_at:
        stats.advance(TextUpdate("a", (1,), times=PEER_TIMES), stats.started + at)
    objectives = LatencyObjectives(ttft_s=0.5)
    stats.finish = FinishReason.LENGTH
    assert [*objectives.verdicts(stats)] == verdicts
    stats.finish = FinishReason.ERROR
    assert [*objectives.verdicts(stats)] == [("ttft", False)]


class PeerTokenEngine(FakeEngine):
    """An engine whose first token is a peer's."""

    def _updates(self, request: Any) -> list[Any]:
        return [replace(update, times=PEER_TIMES) for update in super()._updates(request)]


def test_a_peers_token_counts_in_no_latency(byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(PeerTokenEngine(), byte_tokenizer))
    client.post("/v1/completions", prompt="tea", max_tokens=1)
    client.post("/v1/completions", prompt="tea", max_tokens=2)
    client.post("/v1/completions", prompt="tea", max_tokens=3)
    lines = client.get("/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{engine="0",model_name="fake"}'
    assert figures[f"vllm:time_to_first_token_seconds_count{labels}"] == "2.0"
    assert figures[f"vllm:inter_token_latency_seconds_count{labels}"] == "1.0"
    assert figures[f"vllm:request_time_per_output_token_seconds_count{labels}"] == "1.0"


class TimedEngine(FakeEngine):
    """An engine whose last update has the timestamps of the request."""

    def _updates(self, request: Any) -> list[Any]:
        *updates, last = super()._updates(request)
        times = RequestTimes(1.0, scheduled_at=2.0, num_preemptions=3)
        return [*updates, replace(last, times=times)]


def test_preemptions_of_a_request_are_counted(byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(TimedEngine(), byte_tokenizer))
    assert client.post("/v1/completions", prompt="tea").status_code == 200
    text = client.get("/metrics").text
    name = 'vllm:request_num_preemptions_bucket{engine="0",le="%s",model_name="fake"} %s'
    assert name % ("2.0", "0.0") in text
    assert name % ("3.0", "1.0") in text


@pytest.mark.parametrize("traceparent", [None, f"00-{TRACE_ID}-{PARENT_ID}-01"])
def test_spans_are_children_of_the_callers_span(
    byte_tokenizer: Tokenizer, traceparent: str | None
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(TimedEngine(), byte_tokenizer, tracing=Tracing(provider))
    headers = {"X-Request-Id": "r"} | ({"traceparent": traceparent} if traceparent else {})
    response = AsgiClient(app, headers).post("/v1/completions", prompt="tea", n=2)
    assert response.status_code == 200
    *stages, request = exporter.get_finished_spans()
    assert request.name == "text_completion fake"
    assert (request.parent is None) == (traceparent is None)
    if request.parent is not None:
        assert f"{request.parent.span_id:016x}" == PARENT_ID
        assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert sorted(stage.name for stage in stages) == sorted(["queue", "prefill", "decode"] * 2)
    assert {stage.parent.span_id for stage in stages if stage.parent} == {request.context.span_id}
    assert dict(request.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.choice.count": 2,
        "mooncake.request_id": "r",
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
    }
    queue = next(stage for stage in stages if stage.name == "queue")
    assert (queue.end_time or 0) - (queue.start_time or 0) == pytest.approx(1e9)
    provider.shutdown()


def test_phases_are_counted(byte_tokenizer: Tokenizer) -> None:
    client = AsgiClient(create_app(TimedEngine(), byte_tokenizer))
    client.post("/v1/completions", prompt="tea")
    lines = client.get("/metrics").text.splitlines()
    figures = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    labels = '{engine="0",model_name="fake"}'
    assert figures[f"vllm:request_queue_time_seconds_sum{labels}"] == "1.0"
    for stage in ("prefill", "decode", "inference"):
        assert figures[f"vllm:request_{stage}_time_seconds_count{labels}"] == "1.0"
    assert figures[f"vllm:request_time_per_output_token_seconds_count{labels}"] == "1.0"
    pool = 'block_size="16",engine="0",model_name="fake",num_gpu_blocks="64"'
    assert figures[f"vllm:cache_config_info{{{pool}}}"] == "1.0"


@pytest.mark.parametrize(
    ("engine", "status"),
    [(FakeEngine(fail_at=1), 500), (FakeEngine(late_at=1), 504)],
    ids=["failure", "timeout"],
)
def test_a_failure_sets_the_span_status(
    byte_tokenizer: Tokenizer, engine: FakeEngine, status: int
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = AsgiClient(create_app(engine, byte_tokenizer, tracing=Tracing(provider)))
    assert client.post("/v1/completions", prompt="tea").status_code == status
    [request] = exporter.get_finished_spans()
    assert not request.status.is_ok
    provider.shutdown()
