"""The one table of what differs between NPUs.

Versions are what ``torch_npu.npu.get_soc_version()`` returns, names what the runtime calls a
device. Everything else asks a ``Soc``, read once; nothing asks for a generation's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mooncake_hal.errors import BackendUnavailable

OTHERS = {range(200, 206): "310P", range(260, 261): "950"}
"""What it is known not to run on."""


class HccsDomain(Enum):
    """How far HCCS reaches."""

    SERVER = auto()
    SUPER_NODE = auto()


@dataclass(frozen=True, slots=True)
class Soc:
    """A family of NPUs.

    Args:
        generation: what deployments compare.
        versions: of the runtime.
        prefix: how its devices' names begin, in lower case.
        hccs_domain: within what NPUs reach each other's memory.
        devices_per_server: NPUs (on an A3: dies) of one host.
        transfer_alignment: bytes at whose multiples memory for HCCS begins.
        latent_dims: (latent, rope) that latent attention runs on.
        block_size: tokens per KV block of the attention ops.
        has_nz_weights: whether matrix products run on weights in the private format NZ.
    """

    generation: str
    versions: range
    prefix: str
    hccs_domain: HccsDomain
    devices_per_server: int
    transfer_alignment: int = 2 << 20
    latent_dims: tuple[tuple[int, int], ...] = ((512, 64),)
    block_size: int = 128
    has_nz_weights: bool = True


SOCS = (
    Soc("A2", range(220, 226), "ascend910b", HccsDomain.SERVER, 8),
    Soc("A3", range(250, 256), "ascend910_93", HccsDomain.SUPER_NODE, 16),
)
"""What this backend runs on."""


def find_soc(version: int, name: str) -> Soc:
    """The family of a device.

    Args:
        version: as the runtime says it.
        name: as the runtime calls the device.

    Raises:
        BackendUnavailable: it is none of ``SOCS``, or name and version contradict each other.
    """
    soc = next((each for each in SOCS if version in each.versions), None)
    if soc is not None and name.lower().startswith(soc.prefix):
        return soc
    known = next((family for versions, family in OTHERS.items() if version in versions), "unknown")
    family = soc.generation if soc else known
    wanted = ", ".join(
        f"{each.generation} ({each.prefix}*, {each.versions.start} to {each.versions.stop - 1})"
        for each in SOCS
    )
    raise BackendUnavailable(
        "ascend",
        f"device {name!r} has SoC version {version} ({family}); this backend runs {wanted}",
    )
