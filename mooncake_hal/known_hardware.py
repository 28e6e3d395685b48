"""What is known of backends without their hardware: enough to judge a plan on any machine.

A deployment of GPUs, NPUs and CPUs is planned on a machine that has one of them or none. Every
distribution carries this, and a third party's plugin says its own (``BackendSpec.hardware``). A
test per backend holds it against what the backend says on its device. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mooncake_hal.specs import TransportConstraints


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """What a plan needs to know of a backend where its hardware is not.

    Args:
        generations: of its devices, the one that is meant if none is named first; empty where
            only the device itself can say.
        block_sizes: tokens per KV block, best first.
        transports: those that can move its memory, with what each asks of both ends.
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
    generations=("sm_90", "sm_80", "sm_100"),
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
"""By the backend's name, for plugins that are not even installed."""
