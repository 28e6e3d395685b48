"""Whether two instances are compatible, from the topology that both publish."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hal.deployment import Hardware, InstanceInfo, usable_transports
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.connector import RankEndpointInfo, Topology
from mooncake_proxy.pool.pair_topology import PairTopology, TransportRules, incompatibility_reason

SAME = PairTopology(
    engine_id="a",
    tp_size=2,
    backend="cpu",
    generation="x86",
    transports={"tcp": TransportRules(variants=("4",))},
    must_match={"model": "m1", "KV geometry": "g"},
)
HCCS = TransportRules(same_backend=True, same_generation=True, any_tp_ratio=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"must_match": {"model": "m2", "KV geometry": "g"}}, "model differs: m1 and m2"),
        ({"must_match": {"tokenizer": "t"}}, None),
        ({"transports": {"shm": TransportRules()}}, "no transport in common"),
        (
            {"transports": {"tcp": TransportRules(variants=("4 tls",))}},
            "tcp: needs one release and setting, they are 4; 4 tls",
        ),
        ({"transports": {"tcp": TransportRules(variants=("5", "4"))}}, None),
        ({"transports": {"tcp": TransportRules()}}, None),
        ({"transports": {}}, None),
        ({"tp_size": 3, "backend": "cuda", "generation": "sm_90"}, None),
    ],
)
def test_differing_metadata(changes: dict[str, object], words: str | None) -> None:
    found = incompatibility_reason(SAME, msgspec.structs.replace(SAME, engine_id="b", **changes))
    assert found is None if words is None else words in (found or "")


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        (("old",), ("old",), True),
        (("old",), ("new",), False),
        (("old",), ("none",), False),
        (("old",), (), True),
        (("old", "new"), ("old",), True),
        (("old", "new"), ("new", "old"), True),
        (("new",), ("new", "old"), True),
        (("old",), ("new", "old"), False),
        (("new", "old"), ("old",), False),
    ],
)
def test_each_must_accept_the_secret_that_the_other_proves(
    prefill: tuple[str, ...], decode: tuple[str, ...], fits: bool
) -> None:
    ours, theirs = (
        msgspec.structs.replace(SAME, secret_digests=digests) for digests in (prefill, decode)
    )
    found = incompatibility_reason(ours, theirs)
    assert found is None if fits else "the deployment's secret differs" in (found or "")


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "backends", "generations"),
    [
        (p_tp, d_tp, backends, generations)
        for p_tp in (1, 2, 4)
        for d_tp in (1, 2, 3)
        for backends in (("npu", "npu"), ("npu", "cuda"))
        for generations in (("A2", "A2"), ("A2", "A3"))
    ],
)
def test_rules_match_handshake(
    p_tp: int, d_tp: int, backends: tuple[str, str], generations: tuple[str, str]
) -> None:
    rules = {
        "hccs": TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)
    }
    infos, topologies = [], []
    for tp, backend, generation in zip((p_tp, d_tp), backends, generations, strict=True):
        hardware = Hardware(backend, generation)
        infos.append(InstanceInfo(hardware, tp, 16, 1, rules))
        topologies.append(
            PairTopology("e", tp, backend, generation, {"hccs": HCCS}, {"model": "m"})
        )
    fits = bool(usable_transports(*infos))
    assert (incompatibility_reason(*topologies) is None) is fits


def test_published_topology_is_parsed() -> None:
    rule = TransportConstraints(
        same_backend=True, same_generation=True, any_tp_ratio=False, variants=("5 hixl",)
    )
    ranks = (RankEndpointInfo({"hccs": b"here"}),)
    published = Topology(
        engine_id="e",
        host="host",
        port=8200,
        tp_size=2,
        pp_size=1,
        block_size=16,
        backend="npu",
        generation="A2",
        ranks=ranks,
        transports={"hccs": rule},
        must_match={"model": "m"},
        secret_digests=("12ab",),
    )
    found = msgspec.json.decode(msgspec.json.encode(published), type=PairTopology)
    wanted = PairTopology(
        "e",
        2,
        "npu",
        "A2",
        {"hccs": msgspec.structs.replace(HCCS, variants=("5 hixl",))},
        {"model": "m"},
        splits_choices=True,
        secret_digests=("12ab",),
    )
    assert found == wanted
