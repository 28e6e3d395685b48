"""The location of an NPU, and whether two NPUs reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from mooncake_hal.errors import TransferError, TransportUnavailable
from mooncake_hal_ascend.hccs import npu_location
from mooncake_hal_ascend.hccs.npu_location import NpuLocation, locate, unreachable_reason

A2 = NpuLocation("A2", "boot-a", "", "", 0, "10.0.0.1", "auto")
A3 = NpuLocation("A3", "boot-a", "7", "16777216", 0, "10.0.0.1", "auto")
SPOD = """
        SDID                           : 16777216
        Super Pod Size                 : 384
        Super Pod ID                   : 7
        Server Index                   : 4
"""


def moved(place: NpuLocation, **changes: object) -> NpuLocation:
    return msgspec.structs.replace(place, **changes)


def apart(ours: NpuLocation, theirs: NpuLocation) -> str | None:
    return unreachable_reason(ours.encode(), theirs.encode())


@dataclass
class Tool:
    """A stand-in for npu-smi, which records its command line."""

    answer: str
    asked: Sequence[str] = ()

    def __call__(self, command: Sequence[str]) -> str:
        self.asked = command
        return self.answer


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    boot = tmp_path / "boot_id"
    boot.write_text("boot-a\n")
    monkeypatch.setattr(npu_location, "BOOT_ID", boot)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/hccn.conf").write_text(
        "address_0=10.0.0.1\nnetmask_0=255.255.255.0\n address_5 = 10.0.0.6\n"
    )
    return tmp_path


def test_npus_of_an_a2_server_are_connected_by_hccs() -> None:
    other = moved(A2, device=3, device_address="")
    assert apart(A2, other) is None
    assert apart(A2, A2) is None


def test_a2_servers_are_connected_by_roce() -> None:
    other = moved(A2, server="boot-b", device_address="10.0.0.2")
    assert apart(A2, other) is None
    strict = apart(moved(A2, protocol="hccs"), moved(other, protocol="hccs"))
    assert strict == (
        "HCCS ends at the server boot-a, the peer is in the server boot-b; protocol=auto would go "
        "by RoCE from 10.0.0.1 to 10.0.0.2, or use tcp"
    )


def test_npus_without_addresses_are_unreachable_and_tcp_is_suggested() -> None:
    other = moved(A2, server="boot-b", device_address="")
    assert apart(A2, other) == (
        "HCCS ends at the server boot-a, the peer is in the server boot-b; RoCE needs the NPUs' "
        "addresses, and the peer has none in /etc/hccn.conf: give it one (hccn_tool), or use tcp"
    )
    both = apart(*(moved(place, device_address="", protocol="roce") for place in (A2, other)))
    assert both is not None
    assert "this end and the peer has none" in both


def test_servers_of_a_super_node_are_connected_by_hccs() -> None:
    other = moved(A3, server="boot-b", super_device="16777220", device_address="")
    assert apart(A3, other) is None
    elsewhere = moved(other, super_pod="8", protocol="hccs")
    reason = apart(moved(A3, protocol="hccs"), elsewhere)
    assert reason is not None
    assert reason.startswith("HCCS ends at the super-node 7, the peer is in the super-node 8; RoCE")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (moved(A2, device=1), "this end is an A3, the peer an A2"),
        (moved(A3, device=1, protocol="roce"), "set to protocol=auto, the peer to roce"),
        (moved(A3, server="boot-b"), "both NPUs claim to be number 16777216 of the super-node 7"),
        (moved(A3, device=1, super_device="9"), "both NPUs claim the address 10.0.0.1"),
    ],
)
def test_incompatible_ends_have_a_reason(other: NpuLocation, words: str) -> None:
    reason = apart(A3, other)
    assert reason is not None
    assert words in reason


def test_malformed_location_is_rejected() -> None:
    with pytest.raises(TransferError, match="malformed NPU location"):
        unreachable_reason(A2.encode(), b"somewhere")


def test_a2_is_located_by_files(root: Path) -> None:
    tool = Tool("")
    found = locate("A2", 1, "auto", {"ASCEND_RT_VISIBLE_DEVICES": "4, 5"}, root=root, ask=tool)
    assert found == NpuLocation("A2", "boot-a", "", "", 5, "10.0.0.6", "auto")
    assert tool.asked == ()


def test_a3_queries_its_super_node(root: Path) -> None:
    tool = Tool(SPOD)
    found = locate("A3", 5, "hccs", {}, root=root, ask=tool)
    assert found == NpuLocation("A3", "boot-a", "7", "16777216", 5, "10.0.0.6", "hccs")
    assert tool.asked[-4:] == ["-i", "2", "-c", "1"]


def test_logical_super_node_overrides_the_physical_one(root: Path) -> None:
    found = locate("A3", 0, "auto", {"HCCL_LOGIC_SUPERPOD_ID": "left"}, root=root, ask=Tool(SPOD))
    assert (found.super_pod, found.super_device) == ("left", "16777216")


def test_a3_without_a_known_super_node_is_unavailable(root: Path) -> None:
    with pytest.raises(TransportUnavailable, match=r"npu-smi .* set HCCL_LOGIC_SUPERPOD_ID"):
        locate("A3", 0, "auto", {}, root=root, ask=Tool(""))


def test_missing_hccn_conf_gives_no_address(root: Path) -> None:
    (root / "etc/hccn.conf").unlink()
    assert locate("A2", 0, "auto", {}, root=root, ask=Tool("")).device_address == ""


def test_invisible_device_is_unavailable(root: Path) -> None:
    with pytest.raises(TransportUnavailable, match="has no number for npu:2"):
        locate("A2", 2, "auto", {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, root=root, ask=Tool(""))
