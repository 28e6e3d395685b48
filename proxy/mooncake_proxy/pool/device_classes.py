"""What an instance runs on, and how fast that is beside others: pools may mix NVIDIA, Ascend, CPU.

The facts are those that an instance publishes in `/kv/topology`; the figures are the rows of the
conductor's table of devices. An instance that publishes nothing counts as one A100.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_proxy.pool.pair_topology import PairTopology

if TYPE_CHECKING:
    from mooncake_conductor.cost.latency_model import LatencyModel

# Rows by backend and generation; the first one stands for the class unless the operator names
# another one of it: a generation does not say how much memory a device has, or how it is clocked.
CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("cuda", "sm_80"): ("A100", "A800"),
    ("cuda", "sm_90"): ("H100", "H800", "H200"),
    ("ascend", "A2"): ("910B",),
    ("ascend", "A3"): ("910C",),
}
_USUAL = "A100"


def device_of(topology: PairTopology | None, named: str = "") -> str | None:
    """The table's name of what an instance runs on; None where that is not known.

    Args:
        topology: what it publishes.
        named: a device that the operator named; it stands for all of its class.
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
    """What it runs on, for people; empty where that is not known."""
    if topology is None or not topology.backend:
        return ""
    return f"{topology.num_devices}x {topology.backend} {topology.generation}"


def relative_speed(topology: PairTopology | None) -> float:
    """Work per second, in that of one A100: by what its devices' matrix products reach."""
    device = device_of(topology)
    if device is None or topology is None:
        return 1.0
    return topology.num_devices * _products(device) / _products(_USUAL)


def _products(name: str) -> float:
    from mooncake_conductor.cost.latency_model import DEVICES  # not needed to start

    row = DEVICES[name]
    return row.tflops * row.linear_share


def costs_of(costs: str, topology: PairTopology | None) -> LatencyModel | None:
    """What an instance's prefills and steps take until they are measured; None: not known.

    Args:
        costs: as the operator gave it, MODEL:DEVICE:NUMBER.
        topology: what the instance publishes.
    """
    from mooncake_conductor.cost.latency_model import cold_start

    model, _, rest = costs.partition(":")
    device = device_of(topology, rest.partition(":")[0])
    if device is None or topology is None:
        return None
    return cold_start(model, device, topology.num_devices)
