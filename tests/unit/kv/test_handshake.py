"""The compatibility check of two instances: which metadata must match, and the messages of
rejections."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVGroup, shards_of
from mooncake_hal.kv.layout import make_layout
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.errors import HandshakeRefused
from mooncake_kv.handshake import (
    MAX_INCOMPATIBLE_PEERS,
    IncompatiblePeers,
    InstanceMetadata,
    RankMetadata,
    check_compatible,
)

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4)
FREE = Hardware("cpu", "x86")
STRICT = Hardware("vendor", "A2")
LINKS = TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)
TRANSPORTS = {FREE: {"tcp": TransportConstraints()}, STRICT: {"links": LINKS}}


def facts(
    tp_size: int = 1,
    hardware: Hardware = FREE,
    block_size: int = 16,
    pp_size: int = 1,
    transports: dict[str, TransportConstraints] | None = None,
) -> InstanceMetadata:
    offered = TRANSPORTS[hardware] if transports is None else transports
    ranks = []
    for shard in shards_of(GEOMETRY, tp_size, pp_size):
        layout = make_layout("BHLPT", GEOMETRY, shard, 8, block_size)
        ranks.append(RankMetadata(shard, layout, {name: name.encode() for name in offered}))
    return InstanceMetadata(
        "me", "m1", "t1", GEOMETRY, block_size, hardware, tuple(ranks), transports=offered
    )


def refusal(prefill: InstanceMetadata, decode: InstanceMetadata) -> str:
    with pytest.raises(HandshakeRefused) as refused:
        check_compatible(prefill, decode)
    return str(refused.value)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 4), (4, 2), (3, 2)])
def test_same_model_is_compatible_with_any_ratio_and_block_size(
    prefill_tp: int, decode_tp: int
) -> None:
    check_compatible(facts(prefill_tp, block_size=128), facts(decode_tp, block_size=16))


def test_stages_follow_from_shards_of_ranks() -> None:
    staged = facts(2, pp_size=2)
    assert (staged.tp_size, staged.pp_size) == (2, 2)
    assert (facts(4).tp_size, facts(4).pp_size) == (4, 1)
    check_compatible(staged, facts(1))
    check_compatible(facts(4, STRICT, 128, pp_size=2), facts(2, STRICT, 128))
    words = refusal(facts(2, STRICT, 128, pp_size=2), facts(4, STRICT, 128))
    assert "links: it needs a tensor-parallel size of prefill that is a multiple of" in words
    assert "they are 2 and 4" in words


@pytest.mark.parametrize("missing", range(4))
def test_instance_without_all_ranks_is_rejected(missing: int) -> None:
    staged = facts(2, pp_size=2)
    ranks = tuple(rank for index, rank in enumerate(staged.ranks) if index != missing)
    words = refusal(msgspec.structs.replace(staged, ranks=ranks), facts())
    assert "together don't hold the model's KV" in words


def test_other_model_is_rejected_with_both_values() -> None:
    words = refusal(facts(), msgspec.structs.replace(facts(), model_fingerprint="m2"))
    assert "model differs" in words
    assert "m1" in words
    assert "m2" in words


def test_other_setting_is_rejected_by_name_before_weights_are_compared() -> None:
    one, other = (
        msgspec.structs.replace(facts(), model_fingerprint=dtype, model_settings={"dtype": dtype})
        for dtype in ("bfloat16", "float16")
    )
    words = refusal(one, other)
    assert "the model's dtype differs: the prefill instance has bfloat16" in words
    assert "the decode instance float16" in words


def test_setting_of_one_side_only_is_rejected() -> None:
    words = refusal(facts(), msgspec.structs.replace(facts(), model_settings={"rope": "{}"}))
    assert "the model's rope differs: the prefill instance has None" in words


def test_other_tokenizer_is_rejected_with_both_values() -> None:
    words = refusal(facts(), msgspec.structs.replace(facts(), tokenizer_fingerprint="t2"))
    assert "tokenizer differs" in words
    assert "t1" in words
    assert "t2" in words


def test_other_dtype_is_rejected_with_both_values() -> None:
    narrow = replace(GEOMETRY, dtype="bfloat16", element_bytes=2)
    words = refusal(facts(), msgspec.structs.replace(facts(), geometry=narrow))
    assert "the dtype of KV differs" in words
    assert "float32" in words
    assert "bfloat16" in words


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (3, 2)])
def test_deployment_rules_apply_to_handshake(prefill_tp: int, decode_tp: int) -> None:
    words = refusal(facts(prefill_tp, STRICT, 128), facts(decode_tp, STRICT, 128))
    assert f"they are {prefill_tp} and {decode_tp}" in words


def test_pair_may_use_transports_whose_constraints_it_meets() -> None:
    both = {"links": LINKS, "staged": TransportConstraints()}
    two, three = (facts(size, STRICT, 128, transports=both) for size in (2, 3))
    assert check_compatible(two, two) == ("links", "staged")
    assert check_compatible(two, three) == ("staged",)
    other = facts(2, transports={"staged": TransportConstraints(), "tcp": TransportConstraints()})
    assert check_compatible(two, other) == check_compatible(other, two) == ("staged",)
    assert [set(rank.endpoints) for rank in other.reachable_by(("staged",))] == [{"staged"}] * 2


def test_pair_without_common_transport_is_rejected_by_name() -> None:
    words = refusal(facts(hardware=STRICT, block_size=128), facts())
    assert "links: the decode instance does not offer it; it offers tcp" in words
    assert "tcp: the prefill instance does not offer it; it offers links" in words


UNSOUND_SHARDS = [{"layer_stop": 3}, {"head_start": 4}, {"layer_start": -1}]
UNSOUND_LAYOUTS: list[dict[str, Any]] = [
    {"block_size": 32},
    {"bases": ()},
    {"bases": ((0, 64, 128), (32, 96, 160))},
    {"bases": ((-8, 0), (0, 0))},
    {"bases": ((1 << 64, 0), (0, 0))},
    {"head_strides": (64,)},
]


@pytest.mark.parametrize("change", UNSOUND_SHARDS, ids=str)
def test_shard_outside_the_model_is_rejected(change: dict[str, int]) -> None:
    [rank] = facts().ranks
    lying = msgspec.structs.replace(rank, shard=replace(rank.shard, **change))
    words = refusal(msgspec.structs.replace(facts(), ranks=(lying,)), facts())
    assert "rank 0 of instance me describes its KV memory" in words


@pytest.mark.parametrize("change", UNSOUND_LAYOUTS, ids=str)
def test_contradictory_layout_is_rejected(change: dict[str, Any]) -> None:
    [rank] = facts().ranks
    lying = msgspec.structs.replace(rank, layout=replace(rank.layout, **change))
    words = refusal(facts(), msgspec.structs.replace(facts(), ranks=(lying,)))
    assert "contradicts itself or the model" in words


def test_rejection_is_logged_once_per_epoch(caplog: pytest.LogCaptureFixture) -> None:
    refusals = IncompatiblePeers()
    for name in ("a", "b", "a", "a"):
        refusals.note(name, "model differs")
    logged = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in logged] == [logging.ERROR, logging.ERROR]
    assert logged[0][1].startswith("instance a and this one can't exchange KV")
    assert "model differs. Each request" in logged[0][1]
    assert "restart one of the two" in logged[0][1]
    assert refusals.num_peers == 2


def test_only_failures_of_rejected_peers_are_logged_at_info() -> None:
    refusals = IncompatiblePeers()
    refusals.note("a", "model differs")
    assert refusals.level("a") == logging.INFO
    assert refusals.level("b") == logging.WARNING


def test_only_recent_rejections_are_remembered_and_all_are_counted() -> None:
    refusals = IncompatiblePeers()
    for index in range(MAX_INCOMPATIBLE_PEERS + 1):
        refusals.note(str(index), "model differs")
    assert "0" not in refusals
    assert "1" in refusals
    assert len(refusals.engine_ids) == MAX_INCOMPATIBLE_PEERS
    assert refusals.num_peers == MAX_INCOMPATIBLE_PEERS + 1


def test_instance_without_tokenizer_accepts_any_tokenizer() -> None:
    check_compatible(facts(), msgspec.structs.replace(facts(), tokenizer_fingerprint=""))


def test_other_packing_is_rejected_with_both_values() -> None:
    packed = replace(GEOMETRY, unit=16, format="packed")
    words = refusal(msgspec.structs.replace(facts(), geometry=packed), facts())
    assert (
        "the format of KV blocks differs: the prefill instance has packed, the decode instance "
        "linear; packed blocks can only be exchanged between instances with the same packing"
        in words
    )


@pytest.mark.parametrize("unit", [0, 5, 32])
def test_block_size_must_be_multiple_of_unit(unit: int) -> None:
    torn = msgspec.structs.replace(facts(), geometry=replace(GEOMETRY, unit=unit))
    assert "contradicts itself" in refusal(torn, torn)


def test_sliding_windows_need_same_block_size_and_groups() -> None:
    sliding, full = KVGroup(tuple(range(1, GEOMETRY.layers)), 128), KVGroup((0,))
    grouped = replace(GEOMETRY, groups=(sliding, full))
    small, large = (
        msgspec.structs.replace(facts(block_size=size), geometry=grouped) for size in (16, 128)
    )
    check_compatible(small, small)
    assert "block size differs: the prefill instance has 16, the decode instance 128" in refusal(
        small, large
    )
    assert "how layers share block tables differs" in refusal(small, facts())
    assert facts().must_match["KV geometry"] == small.must_match["KV geometry"]
    assert small.must_match["KV-cache groups"] == str(grouped.groups)
