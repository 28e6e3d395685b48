"""Which GID a port speaks from, which rails speak to each other, and settings."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hal.errors import HalError, PeerLost, TransferError, TransportUnavailable
from mooncake_hal.transports.handshake import encode
from mooncake_hal.transports.rdma.facts import (
    ETHERNET,
    INFINIBAND,
    EndpointFacts,
    LaneFacts,
    OpenLanes,
    RailFacts,
    RegionKeys,
    ReopenLane,
    decode_call,
    decode_facts,
    decode_region_keys,
    pair_rails,
    why_unreachable,
)
from mooncake_hal.transports.rdma.gids import Gid, GidKind, choose_gid
from mooncake_hal.transports.rdma.settings import RdmaSettings, settings_of_endpoint

LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
V1, V2 = GidKind.ROCE_V1, GidKind.ROCE_V2

# -- GIDs -----------------------------------------------------------------------------------------


def table(*entries: tuple[GidKind, str]) -> list[Gid]:
    return [Gid(index, kind, text) for index, (kind, text) in enumerate(entries)]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        # what a RoCE port has: both protocols for each address
        ([(V1, LINK_LOCAL), (V2, LINK_LOCAL), (V1, IPV4), (V2, IPV4)], 3),
        ([(V1, LINK_LOCAL), (V2, LINK_LOCAL), (V1, IPV6), (V2, IPV6)], 3),
        ([(V2, IPV6), (V2, LINK_LOCAL), (V2, IPV4)], 2),
        ([(V1, LINK_LOCAL), (V2, LINK_LOCAL)], 1),
        ([(V1, IPV4)], 0),
        ([(GidKind.INFINIBAND, "fe80::2:c903:0:1")], 0),
        ([(V2, "::"), (V2, "fe80::"), (V2, LINK_LOCAL)], 2),
        ([(V2, IPV4), (V2, "::ffff:10.0.0.2")], 0),
    ],
)
def test_the_best_gid_is_chosen(entries: list[tuple[GidKind, str]], wanted: int) -> None:
    assert choose_gid(table(*entries), "mlx5_0:1").index == wanted


def test_a_gid_can_be_asked_for() -> None:
    entries = table((V1, LINK_LOCAL), (V2, LINK_LOCAL), (V2, IPV4))
    assert choose_gid(entries, "mlx5_0:1", 1).index == 1


@pytest.mark.parametrize(("wanted", "message"), [(-1, "usable GID;"), (7, "usable GID 7;")])
def test_a_port_without_the_gid_says_so(wanted: int, message: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"mlx5_0:1 has no {message}"):
        choose_gid(table((V2, "::")), "mlx5_0:1", wanted)


# -- rails ----------------------------------------------------------------------------------------


def roce(name: str, gid: str = IPV4) -> RailFacts:
    return RailFacts(name, ETHERNET, gid, 0)


def infiniband(name: str, gid: str = "fe80::1") -> RailFacts:
    return RailFacts(name, INFINIBAND, gid, 5)


TWO = [roce("a:1"), roce("b:1")]


@pytest.mark.parametrize(
    ("ours", "theirs", "lanes", "wanted"),
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
def test_rails_are_paired(
    ours: list[RailFacts], theirs: list[RailFacts], lanes: int, wanted: list[tuple[int, int]]
) -> None:
    assert pair_rails(ours, theirs, lanes) == wanted
    assert (why_unreachable(ours, theirs) is None) == bool(wanted)


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ([infiniband("a:1")], [roce("b:1")], "a:1 is InfiniBand, b:1 is Ethernet"),
        ([infiniband("a:1")], [infiniband("b:1", "fec0::1")], "different InfiniBand subnets"),
        ([roce("a:1")], [roce("b:1", IPV6)], "a:1 speaks from .*, b:1 from"),
        ([roce("a:1")], [], "without rails"),
    ],
)
def test_why_rails_do_not_reach(
    ours: list[RailFacts], theirs: list[RailFacts], reason: str
) -> None:
    found = why_unreachable(ours, theirs)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


# -- what goes over the wire ----------------------------------------------------------------------


def test_calls_and_facts_are_read_as_written() -> None:
    lane = LaneFacts(1, IPV4, 0, 2**24 - 1, 0, 3, 16)
    for call in (OpenLanes([0, 1], [lane, lane]), ReopenLane(1, lane)):
        assert decode_call(encode(call)) == call
    facts = EndpointFacts([roce("a:1"), infiniband("b:1")])
    assert decode_facts(encode(facts)) == facts
    keys = RegionKeys([7, 2**32 - 1], [0, 2**64 - 1], True)
    assert decode_region_keys(encode(keys), 2) == keys


@pytest.mark.parametrize(
    "message",
    [
        ["a:1", ETHERNET, "not an address", 0],
        ["a:1", ETHERNET, IPV4, 2**16],
        ["a:1", ETHERNET, IPV4, -1],
        ["a:1", ETHERNET, IPV4],
    ],
)
def test_malformed_facts_are_refused(message: list[object]) -> None:
    with pytest.raises(TransferError, match="no facts of an rdma endpoint"):
        decode_facts(msgspec.msgpack.encode([[message]]))


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
def test_malformed_keys_are_refused(message: object) -> None:
    with pytest.raises(PeerLost, match="broke the rdma protocol"):
        decode_region_keys(msgspec.msgpack.encode(message), 2)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93abc", encode(roce("a:1"))])
def test_malformed_calls_are_refused(data: bytes) -> None:
    with pytest.raises(PeerLost, match="broke the rdma protocol"):
        decode_call(data)


# -- settings -------------------------------------------------------------------------------------


def test_settings_are_read() -> None:
    found = RdmaSettings.of({"devices": "mlx5_0,mlx5_1:2", "gid_index": "3", "window": "0x100"})
    assert found == RdmaSettings(devices="mlx5_0,mlx5_1:2", gid_index=3, window=256)
    assert RdmaSettings.of({}) == RdmaSettings()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"retries": "7"}, "retries must be 0 to 6, it is 7"),
        ({"window": "1"}, "window must be 8 to 32768"),
        ({"timeout": "soon"}, "timeout must be a whole number, it is 'soon'"),
        ({"nic": "mlx5_0"}, r"no setting \['nic'\]; it has .*'devices'"),
    ],
)
def test_bad_settings_are_refused(extra: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RdmaSettings.of(extra)


def test_options_go_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_RDMA", " devices=mlx5_0,mlx5_1  gid_index=3 ")
    found = settings_of_endpoint({"gid_index": "1"})
    assert found == RdmaSettings(devices="mlx5_0,mlx5_1", gid_index=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("gid_index", "MOONCAKE_HAL_RDMA: 'gid_index' is not name=value"),
        ("=3", "MOONCAKE_HAL_RDMA: '=3' is not name=value"),
        ("gid=3", r"MOONCAKE_HAL_RDMA: rdma has no setting \['gid'\]"),
        ("retries=9", "MOONCAKE_HAL_RDMA: rdma setting retries must be 0 to 6"),
    ],
)
def test_a_bad_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_RDMA", value)
    with pytest.raises(HalError, match=message):
        settings_of_endpoint({})
