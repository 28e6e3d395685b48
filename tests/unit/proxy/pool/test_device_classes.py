"""The device class of an instance, from its published metadata."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mooncake_conductor.cost.latency_model import DEVICES, cold_start
from mooncake_proxy.pool.device_classes import (
    CLASSES,
    costs_of,
    describe_device,
    device_of,
    relative_speed,
)
from mooncake_proxy.pool.pair_topology import PairTopology

H100 = PairTopology("e", backend="cuda", generation="sm_90")


@pytest.mark.parametrize(
    ("backend", "generation", "device"),
    [
        ("cuda", "sm_80", "A100"),
        ("ascend", "A2", "910B"),
        ("ascend", "A3", "910C"),
        ("cpu", "x86_64+avx512_bf16", "CPU"),
        ("cuda", "sm_75", None),
        ("mychip", "gen1", None),
        ("", "", None),
    ],
)
def test_device_of(backend: str, generation: str, device: str | None) -> None:
    assert device_of(PairTopology("e", backend=backend, generation=generation)) == device


def test_operators_device_name_applies_within_its_class_only() -> None:
    assert device_of(H100, "H200") == "H200"
    assert device_of(H100, "910B") == "H100"


def test_every_class_has_a_row_in_conductor_table() -> None:
    assert {name for rows in CLASSES.values() for name in rows} <= set(DEVICES)


def test_display_names() -> None:
    assert describe_device(replace(H100, tp_size=4)) == "4x cuda sm_90"
    assert describe_device(PairTopology("e")) == describe_device(None) == ""


def test_speed_of_all_ranks_is_relative_to_one_a100() -> None:
    two = PairTopology("e", tp_size=2, pp_size=1, backend="cuda", generation="sm_80")
    assert relative_speed(two) == 2.0
    assert relative_speed(H100) > 2.5
    assert relative_speed(PairTopology("e", backend="cpu", generation="x")) < 0.01
    assert relative_speed(None) == relative_speed(PairTopology("e", backend="mychip")) == 1.0


def test_initial_costs_are_those_of_its_device() -> None:
    npus = PairTopology("e", tp_size=8, backend="ascend", generation="A2")
    assert costs_of("llama-3-8b:H100:1", npus) == cold_start("llama-3-8b", "910B", 8)
    assert costs_of("llama-3-8b:H200:1", H100) == cold_start("llama-3-8b", "H200", 1)
    assert costs_of("llama-3-8b:H100:1", PairTopology("e")) is None
