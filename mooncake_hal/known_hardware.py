"""Descriptions of the supported hardware, with which a deployment plan can be checked anywhere.

A deployment of GPUs, NPUs and CPUs may be planned on a machine that has only one of them or none.
Every distribution ships these descriptions; third-party plugins provide their own
(``BackendSpec.hardware``). A test per backend compares them with what the backend reports on its
device. Imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mooncake_hal.specs import TransportConstraints


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """What a deployment plan needs to know about a backend whose hardware is not present.

    Args:
        generations: its device generations, the default first; empty if only the device itself can
            tell.
        block_sizes: supported tokens per KV block, best first.
        transports: the transports that can move its memory, with their constraints.
    """

    generations: tuple[str, ...]
    block_sizes: tuple[int, ...]
    transports: Mapping[str, TransportConstraints]


ANYTHING = TransportConstraints()
ONE_KIND = TransportConstraints(same_backend=True, same_generation=True, any_tp_ratio=False)

_MOST_BLOCK_SIZES = (16, 32, 64, 128, 8, 256, 4)

CPU = HardwareInfo(
    generations=(),
    block_sizes=_MOST_BLOCK_SIZES,
    transports={"shm": ANYTHING, "rdma": ANYTHING, "tcp": ANYTHING, "staged": ANYTHING},
)
CUDA = HardwareInfo(
    generations=("sm_90", "sm_80", "sm_86", "sm_89", "sm_100", "sm_103", "sm_120"),
    block_sizes=_MOST_BLOCK_SIZES,
    transports={"cuda_ipc": ANYTHING, "rdma": ANYTHING, "staged": ANYTHING},
)
ASCEND = HardwareInfo(
    generations=("A2", "A3"),
    block_sizes=(128,),
    transports={"hccs": ONE_KIND, "staged": ANYTHING},
)

KNOWN_HARDWARE: Mapping[str, HardwareInfo] = MappingProxyType(
    {"cpu": CPU, "cuda": CUDA, "ascend": ASCEND}
)
"""Hardware by the backend's name; also covers plugins that are not installed."""
