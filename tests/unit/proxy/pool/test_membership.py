"""Instances wanted by a source, compared with those in the pool; what is declared of one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from mooncake_proxy.errors import ConfigError
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.pool.kubernetes import Pod, PodList, specs_of_pods
from mooncake_proxy.pool.membership import (
    ChangeOperation,
    InstanceDefaults,
    MembershipChange,
    MembershipPlan,
    apply_change,
    follow_source,
    parse_store_events,
    plan_membership,
    spec_of,
)
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.pool_file import parse_pool_file


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


def test_source_changes_only_its_own_instances() -> None:
    present = [spec(1, "flags"), spec(2, "file"), spec(3, "file")]
    todo = plan_membership([spec(3, "file"), spec(4, "file")], present, "file")
    assert todo.add == (spec(4, "file"),)
    assert todo.leave == ("http://h:2",)
    back = plan_membership([spec(2, "file"), spec(3, "file")], present, "file", {"http://h:2"})
    assert back == MembershipPlan((spec(2, "file"),), ())


@pytest.mark.parametrize(
    ("text", "endpoints"),
    [
        ("tcp://s1:5557", KVEventEndpoints("tcp://s1:5557")),
        (
            "tcp://s1:5557,tcp://s1:5558",
            KVEventEndpoints("tcp://s1:5557", "tcp://s1:5558"),
        ),
        ("tcp://[fd00::1]:5557,6d", KVEventEndpoints("tcp://[fd00::1]:5557", namespace="6d")),
        (
            "tcp://s1:5557,tcp://s2:5558,6d",
            KVEventEndpoints("tcp://s1:5557", "tcp://s2:5558", namespace="6d"),
        ),
    ],
)
def test_events_of_a_store_are_parsed(text: str, endpoints: KVEventEndpoints) -> None:
    assert parse_store_events(text) == endpoints


@pytest.mark.parametrize(
    "text",
    [
        *("", "s1:5557", "tcp://s1", "tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557"),
        *("tcp://s1:0", "tcp://s1:65536", "tcp://s1:5557,tcp://*:5558", "tcp://s1:5557,model"),
    ],
)
def test_wrong_events_of_a_store_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="wanted tcp://HOST:PORT, and after a comma"):
        parse_store_events(text)


def test_events_of_stores_are_declared_over_http_in_files_and_in_pods() -> None:
    text, wanted = "tcp://s1:5557,6d", (KVEventEndpoints("tcp://s1:5557", namespace="6d"),)
    change = MembershipChange(ChangeOperation.ADD, "http://h:1", Role.BOTH, store_kv_events=(text,))
    assert spec_of(change).store_kv_events == wanted
    entry = {"url": "http://h:1", "store_kv_events": [text]}
    [spec] = parse_pool_file(msgspec.json.encode({"both": [entry]}), "pool.json")
    assert spec.store_kv_events == wanted


def pod(role: str = "both", **annotations: str) -> Pod:
    made = {
        "metadata": {
            "labels": {"mooncake-hal/role": role},
            "annotations": {
                f"mooncake-hal/{name.replace('_', '-')}": text for name, text in annotations.items()
            },
        },
        "spec": {"containers": [{"ports": [{"containerPort": 8100}]}]},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    return msgspec.convert(made, Pod)


def test_number_of_ranks_is_declared_over_http_and_in_files() -> None:
    change = MembershipChange(ChangeOperation.ADD, "http://h:1", Role.BOTH, data_parallel_size=2)
    entry = {"url": "http://h:1", "data_parallel_size": 2}
    [spec] = parse_pool_file(msgspec.json.encode({"both": [entry]}), "pool.json")
    assert spec_of(change).data_parallel_size == spec.data_parallel_size == 2
    with pytest.raises(ConfigError, match="data_parallel_size 2000: wanted 1 to 1024"):
        spec_of(structs.replace(change, data_parallel_size=2000))


def test_options_of_every_instance_apply_to_pods_without_an_annotation() -> None:
    defaults = InstanceDefaults(
        decode_emits_first_token=True,
        decode_recomputes=True,
        prefill_bootstrap_port=8998,
        kv_events_port=5557,
        kv_events_replay_port=5657,
        data_parallel_size=2,
    )
    own = {
        "decode_emits_first_token": "false",
        "prefill_bootstrap_port": "9998",
        "kv_events_port": "6557",
        "kv_events_replay_port": "6657",
        "data_parallel_size": "4",
    }
    pods = [pod("prefill"), pod("decode"), pod("prefill", **own), pod("decode", **own)]
    first, second, third, fourth = specs_of_pods(PodList(pods), defaults)
    for spec in (first, second):
        assert (spec.kv_events_port, spec.kv_events_replay_port) == (5557, 5657)
        assert spec.data_parallel_size == 2
    for spec in (third, fourth):
        assert (spec.kv_events_port, spec.kv_events_replay_port) == (6557, 6657)
        assert spec.data_parallel_size == 4
    assert (first.bootstrap_port, third.bootstrap_port) == (8998, 9998)
    assert [each.emits_first_token for each in (first, second, fourth)] == [False, True, False]
    assert [each.recomputes for each in (first, second, fourth)] == [False, True, True]


def test_pod_with_a_number_that_is_none_has_that_of_the_option(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = ("0", "65536", "http", "9" * 5000)
    pods = PodList([pod(kv_events_port=text, data_parallel_size=text) for text in wrong])
    for _ in range(2):
        found = specs_of_pods(pods, InstanceDefaults(kv_events_port=5557))
        assert [(spec.kv_events_port, spec.data_parallel_size) for spec in found] == [(5557, 1)] * 4
    assert caplog.text.count("kv-events-port of pods: '65536': wanted 1 to 65535") == 1
    assert caplog.text.count("data-parallel-size of pods: '65536': wanted 1 to 1024") == 1


def test_pod_with_wrong_events_of_a_store_is_an_instance_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stores = ("tcp://s1:5557 tcp://s2:5557", "s1")
    pods = PodList([pod(store_kv_events=events) for events in stores])
    right, wrong = specs_of_pods(pods)
    assert [each.endpoint for each in right.store_kv_events] == ["tcp://s1:5557", "tcp://s2:5557"]
    assert wrong.store_kv_events == ()
    specs_of_pods(pods)
    assert caplog.text.count("KV events of a store 's1': wanted tcp://HOST:PORT") == 1


@pytest.mark.parametrize("source", ["kubernetes", "file"])
def test_what_an_operator_removes_stays_out_while_its_source_declares_it_as_before(
    source: str,
) -> None:
    async def main() -> None:
        pools, both = ModelPools(ClientContext()), [spec(1, source), spec(2, source)]

        def followed(wanted: list[InstanceSpec]) -> list[str]:
            follow_source(pools, wanted, source)
            return [instance.name for instance in pools]

        assert followed(both) == ["http://h:1", "http://h:2"]
        removed = MembershipChange(ChangeOperation.DRAIN, "http://h:1", remove=True)
        apply_change(pools, removed)
        assert followed(both) == ["http://h:2"]
        assert followed(both[1:]) == ["http://h:2"]
        assert followed(both) == ["http://h:2", "http://h:1"], "it was withdrawn, and is new"
        apply_change(pools, removed)
        changed = [replace(both[0], role=Role.BOTH), both[1]]
        assert followed(changed) == ["http://h:2", "http://h:1"], "it is declared differently"
        apply_change(pools, MembershipChange(ChangeOperation.REMOVE, "http://h:1"))
        assert followed(changed) == ["http://h:2"]
        apply_change(pools, MembershipChange(ChangeOperation.RESUME, "http://h:1"))
        assert followed(changed) == ["http://h:2", "http://h:1"]
        apply_change(pools, MembershipChange(ChangeOperation.REMOVE, "http://h:1"))
        apply_change(pools, MembershipChange(ChangeOperation.ADD, "http://h:1", Role.DECODE))
        assert pools.get("http://h:1").spec.role is Role.DECODE
        assert pools.removed == {}

    asyncio.run(main())
