"""The meaning of KV's numbers must match; differences in rounding are logged once per peer."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
import pytest

from mooncake_hal.deployment import Hardware
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shards_of
from mooncake_hal.kv.layout import make_layout
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.errors import HandshakeRefused
from mooncake_kv.handshake import (
    InstanceMetadata,
    RankMetadata,
    check_compatible,
    check_decode_peer,
    check_prefill_peer,
)
from mooncake_kv.numerics import MAX_RECORDED, Numerics, RoundingDifferences, differences

HALVES = {"rope order": "halves", "softmax scale": "0.125, on the scores"}
GPU = {"kernels": "sm_90", "attention shares": "bfloat16"}
CPU = {"kernels": "x86", "attention shares": "float32"}


GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 4, (16, 16), "float32", 4)


def facts() -> InstanceMetadata:
    [shard] = shards_of(GEOMETRY, 1)
    rank = RankMetadata(shard, make_layout("BHLPT", GEOMETRY, shard, 8, 16), {"tcp": b"tcp"})
    offered = {"tcp": TransportConstraints()}
    hardware = Hardware("cpu", "x86")
    return InstanceMetadata("me", "m", "t", GEOMETRY, 16, hardware, (rank,), transports=offered)


def refusal(prefill: InstanceMetadata, decode: InstanceMetadata) -> str:
    with pytest.raises(HandshakeRefused) as refused:
        check_compatible(prefill, decode)
    return str(refused.value)


def instance(engine_id: str, meaning: dict[str, str], rounding: dict[str, str]) -> InstanceMetadata:
    return msgspec.structs.replace(
        facts(), engine_id=engine_id, numerics=Numerics(meaning, rounding)
    )


def test_only_properties_of_both_sides_are_compared() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == {"b": ("2", "3")}
    assert differences({}, {"b": "3"}) == {}


@pytest.mark.parametrize(
    ("name", "theirs"), [("rope order", "pairs"), ("softmax scale", "0.0625, on the scores")]
)
def test_other_meaning_is_rejected_with_both_values(name: str, theirs: str) -> None:
    prefill = instance("p", HALVES, GPU)
    words = refusal(prefill, instance("d", {**HALVES, name: theirs}, GPU))
    assert f"KV's {name} differs" in words
    assert f"the prefill instance has {HALVES[name]}, the decode instance {theirs}" in words


def test_properties_that_a_peer_does_not_state_are_ignored() -> None:
    assert check_decode_peer(instance("p", HALVES, GPU), facts()) == ("tcp",)


def test_kv_dtype_is_named_before_geometry() -> None:
    prefill = facts()
    narrow = replace(prefill.geometry, dtype="float8_e4m3fn", element_bytes=1)
    words = refusal(prefill, msgspec.structs.replace(prefill, geometry=narrow))
    assert words.startswith(
        "the dtype of KV differs: the prefill instance has float32, the decode instance "
        "float8_e4m3fn"
    )
    assert "--kv-cache-dtype" in words


def test_must_match_includes_the_meaning() -> None:
    assert instance("p", HALVES, GPU).must_match["KV's rope order"] == "halves"


def test_instance_that_reorders_rope_rows_accepts_both_orders() -> None:
    prefill = instance("p", {**HALVES, "rope order": "pairs"}, GPU)
    converting = msgspec.structs.replace(instance("d", HALVES, GPU), converts_rope_order=True)
    assert check_compatible(prefill, converting) == ("tcp",)
    assert "KV's rope order" not in converting.must_match
    assert "KV's softmax scale" in converting.must_match
    assert "rope order" in refusal(converting, prefill), "the reader has to reorder"
    other = instance("p", {**HALVES, "softmax scale": "1, on the scores"}, GPU)
    assert "softmax scale" in refusal(other, converting)


def test_different_rounding_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rounding = RoundingDifferences()
    check = rounding.noting(check_prefill_peer)
    own = instance("d", HALVES, CPU)
    for _ in range(2):
        assert check(own, instance("p", HALVES, GPU)) == ("tcp",)
    [message] = [record.getMessage() for record in caplog.records]
    assert "KV of instance p is rounded differently from ours" in message
    assert (
        "attention shares: float32 here, bfloat16 there; kernels: x86 here, sm_90 there" in message
    )
    assert rounding.num_peers == 1


def test_equal_rounding_and_rejected_peers_are_not_logged() -> None:
    rounding = RoundingDifferences()
    check = rounding.noting(check_prefill_peer)
    check(instance("d", HALVES, CPU), instance("p", HALVES, CPU))
    with pytest.raises(HandshakeRefused):
        check(instance("d", HALVES, CPU), instance("q", {"rope order": "pairs"}, GPU))
    assert rounding.num_peers == 0


def test_number_of_remembered_peers_is_bounded() -> None:
    rounding = RoundingDifferences()
    own = instance("d", HALVES, CPU)
    for number in range(MAX_RECORDED + 10):
        rounding.note(own, instance(f"p{number}", HALVES, GPU))
    assert rounding.num_peers == MAX_RECORDED + 10
    assert len(rounding._recorded) == MAX_RECORDED
