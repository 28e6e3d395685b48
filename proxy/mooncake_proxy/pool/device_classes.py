"""Device classes of instances and their relative speeds: a pool may mix NVIDIA, Ascend and CPU.

The class follows from what an instance publishes in `/kv/topology`; speeds come from the
conductor's table of devices. An instance that publishes nothing counts as one A100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_proxy.pool.pair_topology import PairTopology

if TYPE_CHECKING:
    from mooncake_conductor.cost.latency_model import LatencyModel

# Devices of the conductor's table by (backend, generation). The first one is assumed unless the
# operator names another one of the class: the generation alone does not determine memory or clock.
CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("cuda", "sm_80"): ("A100", "A800"),
    ("cuda", "sm_90"): ("H100", "H800", "H200"),
    ("ascend", "A2"): ("910B",),
    ("ascend", "A3"): ("910C",),
}
_REFERENCE = "A100"


def device_of(topology: PairTopology | None, named: str = "") -> str | None:
    """Name of an instance's device in the conductor's table; None if unknown.

    Args:
        topology: what the instance publishes.
        named: a device that the operator has named; it is assumed for its whole class.
    """
    if topology is None:
        return None
    if topology.backend == "cpu":
        return "CPU"
    rows = CLASSES.get((topology.backend, topology.generation), ())
    if named in rows:
        return named
    return rows[0] if rows else None


def describe_device(topology: PairTopology | None) -> str:
    """Human-readable devices of an instance; empty if unknown."""
    if topology is None or not topology.backend:
        return ""
    return f"{topology.num_devices}x {topology.backend} {topology.generation}"


def relative_speed(topology: PairTopology | None) -> float:
    """Speed of an instance relative to one A100, by the matrix-product rate of its devices."""
    device = device_of(topology)
    if device is None or topology is None:
        return 1.0
    return topology.num_devices * _products(device) / _products(_REFERENCE)


def _products(name: str) -> float:
    from mooncake_conductor.cost.latency_model import DEVICES  # imported late to start faster

    row = DEVICES[name]
    return row.tflops * row.linear_share


def costs_of(costs: str, topology: PairTopology | None) -> LatencyModel | None:
    """Expected costs of an instance's prefills and steps until they are measured; None if unknown.

    Args:
        costs: the operator's `--costs`, MODEL:DEVICE:NUMBER.
        topology: what the instance publishes.
    """
    from mooncake_conductor.cost.latency_model import cold_start

    model, _, rest = costs.partition(":")
    device = device_of(topology, rest.partition(":")[0])
    if device is None or topology is None:
        return None
    return cold_start(model, device, topology.num_devices)
