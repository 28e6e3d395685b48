"""Messages of the rdma transport, and the pairing of NICs."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.session.authentication import encode
from mooncake_hal.transports.rdma.rdma_messages import (
    ETHERNET,
    INFINIBAND,
    MAX_NICS,
    NicInfo,
    OpenQueuePairs,
    QueuePairInfo,
    QueuePairsOpened,
    RdmaEndpointInfo,
    RegionKeys,
    ReopenQueuePair,
    decode_call,
    decode_endpoint_info,
    decode_region_keys,
    pair_nics,
    unreachable_reason,
)

IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"


def roce(name: str, gid: str = IPV4) -> NicInfo:
    return NicInfo(name, ETHERNET, gid, 0)


def infiniband(name: str, gid: str = "fe80::1") -> NicInfo:
    return NicInfo(name, INFINIBAND, gid, 5)


TWO = [roce("a:1"), roce("b:1")]


@pytest.mark.parametrize(
    ("ours", "theirs", "connections", "wanted"),
    [
        (TWO, TWO, 2, [(0, 0), (1, 1)]),
        (TWO, TWO, 5, [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]),
        (TWO, TWO, 1, [(0, 0), (1, 1)]),
        (TWO, TWO[:1], 1, [(0, 0), (1, 0)]),
        (TWO[:1], [*TWO, roce("c:1")], 2, [(0, 0), (0, 1), (0, 2)]),
        ([infiniband("a:1"), roce("b:1")], [roce("c:1"), infiniband("d:1")], 2, [(0, 1), (1, 0)]),
        ([infiniband("a:1")], TWO, 2, []),
        ([], TWO, 2, []),
    ],
)
def test_nics_are_paired(
    ours: list[NicInfo], theirs: list[NicInfo], connections: int, wanted: list[tuple[int, int]]
) -> None:
    assert pair_nics(ours, theirs, connections) == wanted
    assert (unreachable_reason(ours, theirs) is None) == bool(wanted)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ([infiniband("a:1")], [roce("b:1")], "a:1 is InfiniBand, b:1 is Ethernet"),
        ([infiniband("a:1")], [infiniband("b:1", "fec0::1")], "different InfiniBand subnets"),
        ([roce("a:1")], [roce("b:1", IPV6)], "a:1 has .*, b:1 has .*: two address families"),
        ([roce("a:1")], [], "without NICs"),
    ],
)
def test_unreachable_nics_have_a_reason(
    ours: list[NicInfo], theirs: list[NicInfo], reason: str
) -> None:
    found = unreachable_reason(ours, theirs)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_messages_round_trip() -> None:
    queue_pair = QueuePairInfo(1, IPV4, 0, 2**24 - 1, 0, 3, 16)
    for call in (OpenQueuePairs([0, 1], [queue_pair, queue_pair]), ReopenQueuePair(1, queue_pair)):
        assert decode_call(encode(call)) == call
    info = RdmaEndpointInfo([roce("a:1"), infiniband("b:1")])
    assert decode_endpoint_info(encode(info)) == info
    keys = RegionKeys([7, 2**32 - 1], [0, 2**64 - 1], True)
    assert decode_region_keys(encode(keys), 2) == keys


def test_wire_format_names_are_stable() -> None:
    queue_pair = QueuePairInfo(1, IPV4, 0, 77, 0, 3, 16)
    sent = [1, IPV4, 0, 77, 0, 3, 16]
    messages = (
        (OpenQueuePairs([0], [queue_pair]), {"type": "open", "rails": [0], "lanes": [sent]}),
        (ReopenQueuePair(1, queue_pair), {"type": "reopen", "number": 1, "lane": sent}),
        (QueuePairsOpened([queue_pair]), {"type": "opened", "lanes": [sent]}),
    )
    for message, wanted in messages:
        assert msgspec.msgpack.decode(encode(message)) == wanted


@pytest.mark.parametrize(
    "message",
    [
        ["a:1", ETHERNET, "not an address", 0],
        ["a:1", ETHERNET, IPV4, 2**16],
        ["a:1", ETHERNET, IPV4, -1],
        ["a:1", ETHERNET, IPV4],
    ],
)
def test_malformed_endpoint_info_is_rejected(message: list[object]) -> None:
    with pytest.raises(TransferError, match="not the info of an rdma endpoint"):
        decode_endpoint_info(msgspec.msgpack.encode([[message]]))


def test_endpoint_with_too_many_nics_is_rejected() -> None:
    decode_endpoint_info(encode(RdmaEndpointInfo([roce("a:1")] * MAX_NICS)))
    with pytest.raises(TransferError, match="length <= 256"):
        decode_endpoint_info(encode(RdmaEndpointInfo([roce("a:1")] * (MAX_NICS + 1))))


@pytest.mark.parametrize(
    "message",
    [
        [[1], [0], True],
        [[1, 2], [0], True],
        [[1, 2**32], [0, 0], True],
        [[1, -1], [0, 0], True],
        [[1, 2], [0, 0]],
        "keys",
    ],
)
def test_malformed_keys_are_rejected(message: object) -> None:
    with pytest.raises(PeerLost, match="broke the rdma protocol"):
        decode_region_keys(msgspec.msgpack.encode(message), 2)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93abc", encode(roce("a:1"))])
def test_malformed_calls_are_rejected(data: bytes) -> None:
    with pytest.raises(PeerLost, match="broke the rdma protocol"):
        decode_call(data)
