"""The endpoints that do not generate, and client disconnects."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.asgi import AsgiClient, ManualClient
from support.fake_engine import EOS, FakeEngine

from mooncake_engine.errors import EngineDead, InvalidRequest, Overloaded
from mooncake_engine.messages import EngineInfo, EngineStats, ExpertLoad, total_stats
from mooncake_engine.server.app import create_app
from mooncake_engine.server.request_metrics import _EngineCollector
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.connector import TRANSFER_STATS_HELP, CompatibilityReport, find_connector
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.pool.pool_events import (
    KNOWN_KINDS,
    POOL_STATS_HELP,
    PoolStats,
    StoreLocation,
    StoreReport,
)
from mooncake_kv.store.chunk_store import StoreStats
from mooncake_kv.store.store_metrics import prometheus_text


def test_models_lists_the_served_model(client: AsgiClient) -> None:
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == "fake"
    assert card["max_model_len"] == 256
    assert (card["root"], card["parent"]) == ("models/fake", None)


def test_model_is_found_by_name(client: AsgiClient) -> None:
    assert client.get("/v1/models/fake").json() == client.get("/v1/models").json()["data"][0]
    assert client.get("/v1/models/some/other").status_code == 404


def test_load_is_the_number_of_waiting_clients(client: AsgiClient, engine: FakeEngine) -> None:
    assert client.get("/load").json() == {"server_load": 0}

    async def run() -> None:
        engine.hold_at, engine.held, engine.release = 1, asyncio.Event(), asyncio.Event()
        waiting = ManualClient(b'{"prompt":"tea"}')
        serving = asyncio.ensure_future(client.app(waiting.scope, waiting.receive, waiting.send))
        await engine.held.wait()
        transport = httpx.ASGITransport(client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as other:
            assert (await other.get("/load")).json() == {"server_load": 1}
            engine.release.set()
            await serving
            assert (await other.get("/load")).json() == {"server_load": 0}

    asyncio.run(run())


def test_version_is_that_of_the_package(client: AsgiClient) -> None:
    assert client.get("/version").json() == {"version": version("mooncake-engine")}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_are_rejected_with_a_reason(client: AsgiClient, path: str) -> None:
    response = client.post(path, lora_name="a", lora_path="b")
    assert response.status_code == 501
    assert "merge the adapter" in response.json()["error"]["message"]


def test_health_lists_incompatible_peers(client: AsgiClient, engine: FakeEngine) -> None:
    alone = {"status": "ok", "role": "both", "data_parallel_size": 1, "continues_answers": True}
    assert client.get("/health").json() == alone
    engine.known_compatibility = CompatibilityReport("me", ("her", "him"), {"them": 4096})
    peers = {"engine_id": "me", "refused_peers": ["her", "him"], "bytes_received": {"them": 4096}}
    assert client.get("/health").json() == alone | peers


def test_health_reports_pool_hits(client: AsgiClient, engine: FakeEngine) -> None:
    engine.kv_pool = PoolStats(num_saved_chunks=7, num_found_chunks={"dram": 3, "remote_ssd": 1})
    found = client.get("/health").json()["kv_pool"]
    assert found == {"saved": 7, "found": {"dram": 3, "remote_ssd": 1}}


def test_health_reports_stores_that_the_pool_uses(client: AsgiClient, engine: FakeEngine) -> None:
    """First the one that it saves to, without what does not apply."""
    engine.kv_pool = PoolStats()
    events = KVEventEndpoints("tcp://*:5557", namespace="6d")
    home = StoreReport(StoreLocation("10.0.0.1", 7701, "epoch"), events, "*:7702")
    engine.pool_stores = (home, StoreReport(None, None, "10.0.0.2:7702"))
    found = client.get("/health").json()["kv_pool"]
    assert found == {
        "saved": 0,
        "found": {},
        "store": {"host": "10.0.0.1", "port": 7701, "epoch": "epoch"},
        "kv_events": {"endpoint": "tcp://*:5557", "namespace": "6d"},
        "metrics": "*:7702",
        "other_stores": [{"metrics": "10.0.0.2:7702"}],
    }
    engine.pool_stores = (StoreReport(),)
    assert client.get("/health").json()["kv_pool"] == {"saved": 0, "found": {}}


def test_pool_metrics_begin_at_zero_for_every_kind(client: AsgiClient, engine: FakeEngine) -> None:
    """Otherwise Prometheus does not see the increase to a kind's first count."""
    engine.kv_pool = PoolStats(num_stores=2, num_connected_stores=1, num_save_refusals={"busy": 4})
    text = client.get("/metrics").text
    assert "# TYPE mooncake:kv_pool_num_connected_stores gauge\n" in text
    found = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("mooncake:kv_pool_num_")
    }
    assert found["mooncake:kv_pool_num_connected_stores", None] == 1
    assert found["mooncake:kv_pool_num_save_refusals_total", "busy"] == 4
    for field, kinds in KNOWN_KINDS.items():
        for kind in set(kinds) - {"busy"}:
            assert found[f"mooncake:kv_pool_{field}_total", kind] == 0


def test_help_of_pool_metrics_says_what_they_count(client: AsgiClient, engine: FakeEngine) -> None:
    engine.kv_pool = PoolStats()
    helped = {
        family.name.removeprefix("mooncake:kv_pool_"): family.documentation
        for family in text_string_to_metric_families(client.get("/metrics").text)
        if family.name.startswith("mooncake:kv_pool_")
    }
    assert helped.pop("overlap_ratio")
    assert {*helped} == {field.name for field in fields(PoolStats)} == {*POOL_STATS_HELP}
    for name, text in helped.items():
        assert text.count(" ") >= 2, name
        words = {"bytes": "Bytes", "seconds": "Seconds"}
        for unit, begin in words.items():
            assert (unit in name) == text.startswith(begin), name


def test_help_of_transfer_metrics_says_what_they_count(
    client: AsgiClient, engine: FakeEngine
) -> None:
    engine.kv_transfer = dict.fromkeys(TRANSFER_STATS_HELP, 1.0) | {"of-another": 2.0}
    helped = {
        family.name.removeprefix("mooncake:kv_transfer_"): (family.documentation, family.type)
        for family in text_string_to_metric_families(client.get("/metrics").text)
        if family.name.startswith("mooncake:kv_transfer_")
    }
    assert helped.pop("of_another") == ("The connector's of-another.", "counter")
    assert {*helped} == {*TRANSFER_STATS_HELP}
    for name, (text, kind) in helped.items():
        assert text.count(" ") >= 5, name
        assert (kind == "gauge") is (name in ("leases_held", "reservations")), name
        for unit, begin in {"bytes": "Bytes", "seconds": "Seconds"}.items():
            assert (unit in name) == text.startswith(begin), name


@pytest.mark.parametrize("connector", ["MooncakeConnector", "MooncakeLayerwiseConnector"])
def test_every_transfer_metric_has_a_help_text(connector: str) -> None:
    made = find_connector(connector)(KVTransferConfig(), 1)
    code = type(made).stats.__code__
    names = {name for const in code.co_consts if isinstance(const, tuple) for name in const}
    assert len(names) >= 8
    assert names <= {*TRANSFER_STATS_HELP}


def test_pool_bytes_have_their_transport_as_label(client: AsgiClient, engine: FakeEngine) -> None:
    engine.kv_pool = PoolStats(loaded_bytes=9, loaded_bytes_by_transport={"shm": 4, "rdma": 5})
    found = {
        sample.labels["transport"]: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "mooncake:kv_pool_loaded_bytes_by_transport_total"
    }
    assert found == {"shm": 4, "rdma": 5}


def test_an_embedded_store_exports_store_metrics(client: AsgiClient, engine: FakeEngine) -> None:
    assert "mooncake_store" not in client.get("/metrics").text
    store = StoreStats(capacity_bytes=9, ssd_bytes=4, num_puts=3, num_evicted={"room": 2})
    engine.pool_store = store
    mine, command = (
        {
            (family.type, sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        for text in (client.get("/metrics").text, prometheus_text(store))
    )
    assert command["counter", "mooncake_store_evictions_total", ("reason", "room")] == 2
    engine_labels = [("engine", "0"), ("model_name", "fake")]
    for (kind, name, *labels), value in command.items():
        assert mine[(kind, name, *sorted(labels + engine_labels))] == value


def test_expert_load_is_the_tokens_per_expert(client: AsgiClient, engine: FakeEngine) -> None:
    assert client.get("/expert_load").status_code == 404
    engine.experts = ExpertLoad({1: (3, 0, 9)}, 1.5, 4, num_placements=2, num_moved=7)
    assert client.get("/expert_load").json()["tokens"] == {"1": [3, 0, 9]}
    lines = client.get("/metrics").text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("mooncake:expert_"))
    assert {name.partition("{")[0]: float(value) for name, value in found.items()} == {
        "mooncake:expert_tokens_total": 12.0,
        "mooncake:expert_rows_sent_total": 4.0,
        "mooncake:expert_imbalance": 1.5,
        "mooncake:expert_placements_total": 2.0,
        "mooncake:expert_moves_total": 7.0,
    }


def test_metrics_have_one_engine_per_data_parallel_rank() -> None:
    store = StoreStats(num_puts=3)  # one store, shared by all ranks
    parts = [
        EngineStats(
            num_running=1,
            prompt_tokens=15,
            prompt_tokens_by_source={"local_compute": 5, "local_cache_hit": 4, "p2p": 6},
            kv_transfer={"loads": 1.0},
            pool_store=store,
        ),
        EngineStats(num_running=2, pool_store=store),
    ]
    load = ExpertLoad({0: (3, 1)}, 1.5, 4)
    total = total_stats([replace(part, experts=load) for part in parts])
    assert (total.num_running, total.prompt_tokens) == (3, 15)
    assert total.prompt_tokens_by_source["p2p"] == 6
    assert total.experts == replace(load, num_sent_rows=8)
    info = EngineInfo(256, 258, (0,), 64, 16, "me", dp_size=2)
    engine: Any = SimpleNamespace(info=info, stats=lambda: total)
    samples = [
        sample for family in _EngineCollector(engine, "m").collect() for sample in family.samples
    ]
    found = {(sample.name, sample.labels["engine"]): sample.value for sample in samples}
    assert found["vllm:num_requests_running", "0"] == 1
    assert found["vllm:num_requests_running", "1"] == 2
    assert found["vllm:prompt_tokens_total", "0"] == 15
    assert found["vllm:prompt_tokens_cached_total", "0"] == 10
    assert found["vllm:external_prefix_cache_queries_total", "0"] == 11
    assert found["vllm:external_prefix_cache_hits_total", "0"] == 6
    assert {
        sample.labels["source"]: sample.value
        for sample in samples
        if "by_source" in sample.name and sample.labels["engine"] == "0" and sample.value
    } == {
        "local_compute": 5,
        "local_cache_hit": 4,
        "external_kv_transfer": 6,
        "device": 4,
        "p2p": 6,
    }
    assert found["mooncake:expert_rows_sent_total", "0"] == 8
    assert found["mooncake_store_puts_total", "0"] == 3
    for name in ("mooncake:expert_rows_sent_total", "mooncake_store_puts_total"):
        assert (name, "1") not in found


def test_a_request_may_select_its_data_parallel_rank(
    client: AsgiClient, engine: FakeEngine
) -> None:
    def ask(rank: str) -> httpx.Response:
        named = replace(client, headers={"X-data-parallel-rank": rank})
        return named.post("/v1/completions", prompt="hi", max_tokens=1)

    assert ask("0").status_code == 200
    assert engine.seen[-1].data_parallel_rank == 0
    refused = ask("-1")
    assert refused.status_code == 400
    assert "must be a number from 0 on" in refused.json()["error"]["message"]


def test_health_is_503_after_a_death(client: AsgiClient, engine: FakeEngine) -> None:
    assert client.get("/health").status_code == 200
    engine.death = EngineDead("a worker ended: status 9")
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "a worker ended: status 9"


def test_tokenize_and_detokenize(client: AsgiClient) -> None:
    answer = client.post("/tokenize", prompt="é<|eos|>", return_token_strs=True).json()
    assert answer["tokens"] == [0xC3, 0xA9, EOS]
    assert answer["count"] == 3
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == ["\ufffd", "\ufffd", "<|eos|>"]
    assert client.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "é<|eos|>"}


def test_tokenizer_info_is_served_where_the_option_allows_it(
    client: AsgiClient, engine: FakeEngine, byte_tokenizer: Tokenizer
) -> None:
    assert client.get("/tokenizer_info").status_code == 404
    options = ServerOptions(enable_tokenizer_info_endpoint=True, api_keys=frozenset({"secret"}))
    app = create_app(engine, byte_tokenizer, options)
    assert AsgiClient(app).get("/tokenizer_info").status_code == 401
    found = AsgiClient(app, {"Authorization": "Bearer secret"}).get("/tokenizer_info").json()
    assert found["chat_template"] == byte_tokenizer.chat_template
    assert found["tokenizer_class"]
    assert not [name for name in found if name.endswith("_file")]


def test_tokenize_messages(client: AsgiClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = client.post("/tokenize", messages=messages).json()["tokens"]
    assert bytes(tokens) == b"<|user|>hi\n<|assistant|>"


def test_tokenize_counts_like_a_chat_request(client: AsgiClient) -> None:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}],
        "continue_final_message": True,
        "chat_template_kwargs": {"unknown": 1},
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    tokens = client.post("/tokenize", **body).json()["tokens"]
    assert bytes(tokens).endswith(b"He")
    answer = client.post("/v1/chat/completions", **body, max_tokens=1, tool_choice="none").json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": []}, "give either prompt or messages"),
        ("/detokenize", {"tokens": [258]}, "tokens must be in [0, 258), got 258"),
        ("/abort", {}, "request_id is required"),
    ],
)
def test_invalid_bodies_are_rejected(
    client: AsgiClient, path: str, body: dict[str, object], words: str
) -> None:
    response = client.post(path, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_prefix_cache_can_be_reset_unless_in_use(
    client: AsgiClient, engine: FakeEngine
) -> None:
    assert client.post("/reset_prefix_cache").status_code == 200
    engine.is_busy = True
    response = client.post("/reset_prefix_cache")
    assert response.status_code == 409
    assert "while requests use the KV cache" in response.json()["error"]["message"]
    assert engine.num_resets == 2


def test_abort_releases_kv_held_for_a_peer(client: AsgiClient, engine: FakeEngine) -> None:
    assert client.post("/abort", request_id="req-9-a1b2").status_code == 200
    assert engine.aborted == ["req-9-a1b2"]


def samples(exposition: str) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.get(name, "") for name in ("finished_reason",)): (
            sample.value
        )
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_count_requests(client: AsgiClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", prompt="tea")
    client.post("/v1/completions", prompt="tea", max_tokens=2)
    engine.die_at = 1
    client.post("/v1/completions", prompt="tea")
    found = samples(client.get("/metrics").text)
    assert found["vllm:request_success_totalstop"] == 1
    assert found["vllm:request_success_totallength"] == 1
    assert found["vllm:request_success_totalerror"] == 1
    assert found["vllm:request_success_totaltimeout"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == 4
    assert found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:request_prompt_tokens_sum"] == 6
    assert found["vllm:request_generation_tokens_sum"] == 6


@pytest.mark.parametrize("streams", [False, True])
def test_metrics_count_timeouts_as_such(
    client: AsgiClient, engine: FakeEngine, *, streams: bool
) -> None:
    engine.late_at = 1
    client.post("/v1/completions", prompt="tea", n=2, stream=streams)
    found = samples(client.get("/metrics").text)
    assert found["vllm:request_success_totaltimeout"] == 2
    assert found["vllm:request_success_totalerror"] == 0


@pytest.mark.parametrize(
    ("refusal", "status"), [(Overloaded("full"), 429), (InvalidRequest("no"), 400), (None, 429)]
)
def test_metrics_count_no_refused_request(
    client: AsgiClient, engine: FakeEngine, refusal: Exception | None, status: int
) -> None:
    """Neither one that the engine refuses, nor one for whose choices it has no room."""
    engine.refusal = refusal
    engine.room = 1 if refusal is None else 2
    assert client.post("/v1/completions", prompt="tea", n=2).status_code == status
    found = samples(client.get("/metrics").text)
    assert not any(n for name, n in found.items() if name.startswith("vllm:request_success_total"))


def test_metrics_show_request_parameters(client: AsgiClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    client.post("/v1/completions", prompt=["tea", "coffee"], n=2, max_tokens=4)
    client.post("/v1/completions", prompt="tea", max_tokens=2)
    found = samples(client.get("/metrics").text)
    assert found["vllm:request_params_n_count"] == 3  # one per prompt
    assert found["vllm:request_params_n_sum"] == 5
    assert found["vllm:request_params_max_tokens_count"] == 5  # one per answer
    assert found["vllm:request_params_max_tokens_sum"] == 18
    assert found["vllm:request_max_num_generation_tokens_count"] == 3
    assert found["vllm:request_max_num_generation_tokens_sum"] == 10
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 1 + 1 + 4 + 4 + 1
    assert found["process_resident_memory_bytes"] > 0


def test_responses_are_counted_by_status_class(client: AsgiClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", prompt="tea")
    client.stream("/v1/completions", prompt="tea")
    client.post("/v1/completions", prompt="tea", temprature=1)
    client.get("/v1/models/other")
    client.get("/health")
    engine.refusal = EngineDead("out of luck")
    client.post("/v1/completions", prompt="tea")
    counted = {
        (sample.labels["handler"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "2xx"): 2,
        ("/v1/completions", "4xx"): 1,
        ("/v1/completions", "5xx"): 1,
        ("/v1/models/", "4xx"): 1,
    }


def test_monotonic_values_are_counters(client: AsgiClient) -> None:
    """By type and name: a gauge's rate would be wrong after a restart."""
    families = list(text_string_to_metric_families(client.get("/metrics").text))
    kinds = {family.name: family.type for family in families}
    assert kinds["mooncake:kv_transfer_bytes_received"] == "counter"
    assert kinds["mooncake:kv_transfer_leases_held"] == "gauge"
    for family in families:
        names = {sample.name for sample in family.samples if not sample.name.endswith("_created")}
        if family.type == "counter":
            assert names <= {f"{family.name}_total"}


def test_metrics_show_the_engine(client: AsgiClient) -> None:
    found = samples(client.get("/metrics").text)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 4
    assert found["vllm:num_requests_swapped"] == 2
    assert found["vllm:num_preemptions_total"] == 5
    assert found["mooncake:num_swap_outs_total"] == 4
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:prompt_tokens_total"] == 7
    assert found["mooncake:kv_transfer_bytes_received_total"] == 9


def test_kv_byte_seconds_are_counted_by_purpose(client: AsgiClient) -> None:
    families = text_string_to_metric_families(client.get("/metrics").text)
    [family] = [family for family in families if family.name == "mooncake:kv_byte_seconds"]
    found = {sample.labels["held_for"]: sample.value for sample in family.samples}
    assert found == {"running": 30.0, "leased": 2.5}


def slo_requests(client: AsgiClient) -> dict[tuple[str, str, str], float]:
    return {
        (sample.labels["class"], sample.labels["objective"], sample.labels["met"]): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == "mooncake:slo_requests_total"
    }


def test_objectives_are_counted_by_request_class(
    engine: FakeEngine, byte_tokenizer: Tokenizer
) -> None:
    options = ServerOptions(slo_ttft_ms=1e9, slo_tbt_ms=1e-6)  # always met, never met
    client = AsgiClient(create_app(engine, byte_tokenizer, options))
    client.post("/v1/completions", prompt="tea")
    client.post("/v1/completions", prompt="tea", n=2, priority=1000)
    client.post("/v1/completions", prompt="tea", max_tokens=1)  # no gap, so none was late
    engine.fail_at = 1
    client.post("/v1/completions", prompt="tea", priority=999)
    assert slo_requests(client) == {
        ("interactive", "ttft", "true"): 2,
        ("interactive", "ttft", "false"): 1,
        ("interactive", "tbt", "true"): 1,
        ("interactive", "tbt", "false"): 2,
        ("batch", "ttft", "true"): 2,
        ("batch", "tbt", "false"): 2,
    }


def test_without_objectives_nothing_is_counted(client: AsgiClient) -> None:
    client.post("/v1/completions", prompt="tea")
    assert slo_requests(client) == {}


def test_metrics_show_waits_and_step_sizes(client: AsgiClient) -> None:
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {
        (sample.name, sample.labels.get("reason") or sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
    }
    waiting = "vllm:num_requests_waiting_by_reason"
    assert (found[waiting, "capacity"], found[waiting, "deferred"]) == (3, 1)
    steps = "vllm:iteration_tokens_total"
    bounds = ("1.0", "2.0", "4.0", "32.0", "64.0", "+Inf")
    assert [found[f"{steps}_bucket", bound] for bound in bounds] == [2, 2, 3, 3, 4, 4]
    assert (found[f"{steps}_sum", None], found[f"{steps}_count", None]) == (70, 4)


@pytest.mark.parametrize(("stream", "hold_at"), [("true", 0), ("true", 1), ("false", 1)])
def test_a_client_disconnect_aborts_its_request(
    client: AsgiClient, engine: FakeEngine, stream: str, hold_at: int
) -> None:
    async def leave() -> ManualClient:
        engine.hold_at, engine.held, engine.release = hold_at, asyncio.Event(), asyncio.Event()
        leaving = ManualClient(f'{{"prompt":"tea","stream":{stream}}}'.encode())
        serving = asyncio.ensure_future(client.app(leaving.scope, leaving.receive, leaving.send))
        await engine.held.wait()
        leaving.gone.set()
        await serving
        return leaving

    leaving = asyncio.run(leave())
    assert len(engine.left_early) == 1
    assert not any(message.get("body") == b"data: [DONE]\n\n" for message in leaving.sent)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'{"prompt":"tea"}', [(b"x-request-id", b"mine")]),
        (b'{"prompt":"tea","request_id":"mine"}', []),
    ],
)
def test_abort_by_client_request_id(
    client: AsgiClient, engine: FakeEngine, body: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    async def abort() -> ManualClient:
        engine.hold_at, engine.held, engine.release = 1, asyncio.Event(), asyncio.Event()
        waiting = ManualClient(body, headers=headers)
        serving = asyncio.ensure_future(client.app(waiting.scope, waiting.receive, waiting.send))
        await engine.held.wait()
        aborting = ManualClient(b'{"request_id":"mine"}', "/abort")
        await client.app(aborting.scope, aborting.receive, aborting.send)
        await serving
        return waiting

    waiting = asyncio.run(abort())
    assert waiting.sent[0]["status"] == 409
    assert (b"x-should-retry", b"false") in waiting.sent[0]["headers"]
    assert b'"code":"aborted"' in waiting.sent[1]["body"]
    assert engine.left_early == ["mine"]
