"""Instances of one deployment take devices of their own, or their part of the same ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mooncake_engine import instance_arguments
from mooncake_engine.cli import build_parser
from mooncake_engine.errors import ConfigError
from mooncake_engine.instance_arguments import device_argv
from mooncake_engine.process.device_division import (
    DeviceShare,
    InstanceNeeds,
    device_options,
    divide_devices,
)
from mooncake_engine.process.local_deployment import LocalDeployment

GPU = InstanceNeeds("cuda", 1)


def test_each_instance_has_devices_of_its_own_while_there_are_any() -> None:
    assert divide_devices(4, [2, 1, 1]) == [DeviceShare(0), DeviceShare(2), DeviceShare(3)]
    assert divide_devices(8, [1, 1]) == [DeviceShare(0), DeviceShare(1)]


@pytest.mark.parametrize(
    ("num_devices", "num_ranks", "shares"),
    [
        (1, [1, 1], [(0, 2), (0, 2)]),
        (1, [1, 1, 1], [(0, 3), (0, 3), (0, 3)]),
        (2, [1, 1, 1], [(0, 2), (1, 1), (0, 2)]),
        (2, [2, 2], [(0, 2), (0, 2)]),
        (3, [2, 2], [(0, 2), (0, 2)]),
        (4, [4, 1], [(0, 2), (0, 2)]),
    ],
)
def test_with_fewer_devices_instances_share_their_memory(
    num_devices: int, num_ranks: list[int], shares: list[tuple[int, int]]
) -> None:
    found = divide_devices(num_devices, num_ranks)
    assert found == [DeviceShare(*share) for share in shares]
    for device in range(num_devices):
        on_it = [
            share
            for share, ranks in zip(found, num_ranks, strict=True)
            if share.first <= device < share.first + ranks
        ]
        assert sum(share.memory_utilization for share in on_it) <= 0.9 + 1e-9


def test_an_instance_that_has_too_few_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks needs 4 devices, but this host has 2"):
        divide_devices(2, [1, 4])


def test_what_instances_are_told() -> None:
    pair = [GPU, GPU]
    assert device_options(pair, lambda _: 2) == [("--device", "0"), ("--device", "1")]
    half = ("--device", "0", "--memory-utilization", "0.45")
    assert device_options(pair, lambda _: 1) == [half, half]
    has_memory = replace(GPU, has_memory=True)
    assert device_options([has_memory, GPU], lambda _: 1) == [("--device", "0"), half]
    # on the host's processors, and where somebody says which, all stays as it is said
    assert device_options(pair, lambda _: 0) == [(), ()]
    assert device_options([replace(GPU, has_device=True), GPU], lambda _: 4) == [(), ()]
    mixed = [GPU, InstanceNeeds("cpu", 1), GPU]
    counts = {"cuda": 2, "cpu": 0}
    assert device_options(mixed, counts.__getitem__) == [("--device", "0"), (), ("--device", "1")]


def test_up_divides_by_what_its_roles_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        instance_arguments,
        "device_options",
        lambda instances: [(f"{each.backend}:{each.num_ranks}",) for each in instances],
    )
    argv = ["up", "--model", "examples/tiny-llama", "--backend", "cuda", "--decode", "2"]
    args = build_parser().parse_args([*argv, "--prefill-args=--tp-size 2"])
    assert device_argv(args) == (("cuda:2",), ("cuda:1",), ("cuda:1",))


def test_instances_on_one_device_start_one_after_the_other() -> None:
    half = ("--device", "0", "--memory-utilization", "0.45")
    alone = LocalDeployment("127.0.0.1", 0, 1, 1, ())
    assert not alone.shares_devices
    assert not replace(alone, device_argv=((), ())).shares_devices
    assert replace(alone, device_argv=(half, half)).shares_devices
    assert not replace(alone, device_argv=(("--device", "0"), ("--device", "1"))).shares_devices
