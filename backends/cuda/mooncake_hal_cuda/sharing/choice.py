"""Which kind of memory KV lies in: decided from facts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mooncake_hal.errors import CapabilityError
from mooncake_hal_cuda.sharing.fabric import Domain

AUTO = "auto"


class MemoryKind(Enum):
    """How other processes map the memory.

    IPC: by the name of a whole allocation (cuIpcGetMemHandle); processes of one host.
    DESCRIPTOR: by a file descriptor that is passed to them; processes of one host.
    FABRIC: by a name that is good in the whole NVLink domain, on other hosts too.
    """

    IPC = "ipc"
    DESCRIPTOR = "fd"
    FABRIC = "fabric"


KINDS = (AUTO, *(kind.value for kind in MemoryKind))
"""What MOONCAKE_HAL_CUDA_MEMORY may be."""


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """What a device can do.

    Args:
        no_descriptors: why its memory can't be had by descriptor; empty if it can.
        no_fabric: why it can't be had through the fabric; empty if it can.
        domain: that it is in; only where it can.
        is_rdma: whether such memory can be registered with NICs.
    """

    no_descriptors: str
    no_fabric: str
    domain: Domain | None
    is_rdma: bool


@dataclass(frozen=True, slots=True)
class Sharing:
    """What was decided for a device.

    Args:
        kind: of its memory.
        reason: why none of the better ones.
        domain: that other hosts' processes find it in; only of kind FABRIC.
        is_rdma: whether it is allocated for NICs too.
    """

    kind: MemoryKind
    reason: str
    domain: Domain | None
    is_rdma: bool


def decide(wanted: str, facts: SharingFacts) -> Sharing:
    """The kind with the longest reach that the device has, or the one that was asked for.

    Raises:
        CapabilityError: the device does not have that one; the message says why.
    """
    refusals = {
        MemoryKind.FABRIC: facts.no_fabric,
        MemoryKind.DESCRIPTOR: facts.no_descriptors,
        MemoryKind.IPC: "",
    }
    if wanted == AUTO:
        kind = next(kind for kind, refusal in refusals.items() if not refusal)
        better = (f"no {kind.value}: {refusal}" for kind, refusal in refusals.items() if refusal)
        reason = "; ".join(better) if kind is not MemoryKind.FABRIC else "other hosts reach it"
    else:
        kind, reason = MemoryKind(wanted), "it was asked for"
        if refusals[kind]:
            raise CapabilityError(
                f"memory of kind {wanted!r} was asked for (MOONCAKE_HAL_CUDA_MEMORY), but "
                f"{refusals[kind]}; use 'auto'"
            )
    domain = facts.domain if kind is MemoryKind.FABRIC else None
    return Sharing(kind, reason, domain, facts.is_rdma and kind is not MemoryKind.IPC)
