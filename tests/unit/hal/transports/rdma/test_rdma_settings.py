"""Settings, and the GID that a port uses."""

from __future__ import annotations

import pytest

from mooncake_hal.errors import HalError, TransportUnavailable
from mooncake_hal.transports.rdma.rdma_settings import (
    Gid,
    GidKind,
    RdmaSettings,
    choose_gid,
    choose_ports,
    settings_of_endpoint,
)

LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
V1, V2 = GidKind.ROCE_V1, GidKind.ROCE_V2


def table(*entries: tuple[GidKind, str]) -> list[Gid]:
    return [Gid(index, kind, text) for index, (kind, text) in enumerate(entries)]


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        # a RoCE port has both protocols for each address
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


def test_gid_index_can_be_set() -> None:
    entries = table((V1, LINK_LOCAL), (V2, LINK_LOCAL), (V2, IPV4))
    assert choose_gid(entries, "mlx5_0:1", 1).index == 1


@pytest.mark.parametrize(("wanted", "message"), [(-1, "usable GID;"), (7, "usable GID 7;")])
def test_missing_gid_is_reported(wanted: int, message: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"mlx5_0:1 has no {message}"):
        choose_gid(table((V2, "::")), "mlx5_0:1", wanted)


PORTS = ["mlx5_0:1", "mlx5_1:2"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("", ["mlx5_0:1", "mlx5_1:2"]),
        ("mlx5_0", ["mlx5_0:1"]),
        ("mlx5_1:2,mlx5_0", ["mlx5_1:2", "mlx5_0:1"]),
    ],
)
def test_ports_can_be_chosen(wanted: str, found: list[str]) -> None:
    assert choose_ports(wanted, PORTS) == found


@pytest.mark.parametrize("wanted", ["mlx5_1", "mlx5_0,mlx5_9", ","])
def test_inactive_ports_cannot_be_chosen(wanted: str) -> None:
    with pytest.raises(TransportUnavailable, match="is not among the ports"):
        choose_ports(wanted, PORTS)


def test_host_without_active_ports_is_unavailable() -> None:
    with pytest.raises(TransportUnavailable, match="no RDMA port of this host is up"):
        choose_ports("", [])


def test_settings_are_parsed() -> None:
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
def test_invalid_settings_are_rejected(extra: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RdmaSettings.of(extra)


def test_options_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_invalid_environment_is_rejected(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("MOONCAKE_HAL_RDMA", value)
    with pytest.raises(HalError, match=message):
        settings_of_endpoint({})
