"""Instances of one deployment get devices of their own, or a share of common ones."""

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


def test_instances_get_separate_devices_if_there_are_enough() -> None:
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
def test_too_few_devices_are_shared_by_memory(
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


def test_instance_with_more_ranks_than_devices_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"4 ranks needs 4 devices, but this host has 2"):
        divide_devices(2, [1, 4])


def test_device_options_depend_on_backend_and_explicit_options() -> None:
    pair = [GPU, GPU]
    assert device_options(pair, lambda _: 2) == [("--device", "0"), ("--device", "1")]
    half = ("--device", "0", "--memory-utilization", "0.45")
    assert device_options(pair, lambda _: 1) == [half, half]
    has_memory = replace(GPU, has_memory=True)
    assert device_options([has_memory, GPU], lambda _: 1) == [("--device", "0"), half]
    # CPU instances, and instances with an explicit device, get no options
    assert device_options(pair, lambda _: 0) == [(), ()]
    assert device_options([replace(GPU, has_device=True), GPU], lambda _: 4) == [(), ()]
    mixed = [GPU, InstanceNeeds("cpu", 1), GPU]
    counts = {"cuda": 2, "cpu": 0}
    assert device_options(mixed, counts.__getitem__) == [("--device", "0"), (), ("--device", "1")]


def test_up_divides_devices_by_the_ranks_of_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        instance_arguments,
        "device_options",
        lambda instances: [(f"{each.backend}:{each.num_ranks}",) for each in instances],
    )
    argv = ["up", "--model", "examples/tiny-llama", "--backend", "cuda", "--decode", "2"]
    args = build_parser().parse_args([*argv, "--prefill-args=--tp-size 2"])
    assert device_argv(args) == (("cuda:2",), ("cuda:1",), ("cuda:1",))


def test_instances_with_a_memory_share_share_devices() -> None:
    half = ("--device", "0", "--memory-utilization", "0.45")
    alone = LocalDeployment("127.0.0.1", 0, 1, 1, ())
    assert not alone.shares_devices
    assert not replace(alone, device_argv=((), ())).shares_devices
    assert replace(alone, device_argv=(half, half)).shares_devices
    assert not replace(alone, device_argv=(("--device", "0"), ("--device", "1"))).shares_devices
