"""The network that groups on several hosts use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mooncake_hal.backend import GroupSpec
from mooncake_hal.errors import DeviceError
from mooncake_hal.testing.backends import free_port
from mooncake_hal_cpu.cpu_backend import GlooCommunicator, own_address

# loopback, but not one of the addresses by which a group is known to be on one host
OTHER_LOOPBACK = "127.0.0.2"


def sum_of_two_ranks() -> float:
    meeting = f"tcp://{OTHER_LOOPBACK}:{free_port()}"

    def one(rank: int) -> float:
        group = GlooCommunicator(GroupSpec(rank, 2, meeting, 20.0), 0)
        try:
            return group.all_reduce(torch.tensor([rank + 1.0])).item()
        finally:
            group.close()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(one, range(2))
    assert first == second
    return first


def test_named_interface_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert sum_of_two_ranks() == 3.0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    with pytest.raises(DeviceError, match="absent0"):
        sum_of_two_ranks()


def test_default_network_is_that_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert sum_of_two_ranks() == 3.0
    assert own_address(GroupSpec(1, 2, f"tcp://{OTHER_LOOPBACK}:1", 20.0)) == "127.0.0.1"
    assert own_address(GroupSpec(1, 2, "file://127.0.0.1/meeting", 20.0)) == "127.0.0.1"
