"""The one table of what differs between NPUs.

Versions are what ``torch_npu.npu.get_soc_version()`` returns, names what the runtime calls a
device. Everything else asks a ``Soc``, read once; nothing asks for a generation's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.fused_experts import ExpertShape

OTHERS = {range(200, 206): "310P", range(260, 261): "950"}
"""What it is known not to run on."""


class HccsDomain(Enum):
    """How far HCCS reaches."""

    SERVER = auto()
    SUPER_NODE = auto()


_MIB = 1 << 20
_MOST_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class FusedExpertLimits:
    """What npu_moe_distribute_dispatch takes, by its documentation (Ascend Extension for PyTorch
    7.1). Other groups than these exchange rows by all-to-all.

    Args:
        ranks: sizes of a group.
        hidden_sizes: of a row; they begin at 32 and are multiples of it, or are one.
        tokens: of a rank in one call, at most.
        chosen: experts of a token, at most.
        experts_per_rank: at most.
        has_expert_scales: whether weights go along with rows. Buffers are counted otherwise, too.
    """

    ranks: tuple[int, ...]
    hidden_sizes: range
    tokens: int
    chosen: int
    experts_per_rank: int
    has_expert_scales: bool

    def why_not(self, ranks: int, shape: ExpertShape) -> str | None:
        """What is beyond these limits; None if nothing is."""
        if ranks not in self.ranks:
            return f"{ranks} ranks, it takes {', '.join(map(str, self.ranks))}"
        if shape.hidden_size not in self.hidden_sizes:
            last = self.hidden_sizes[-1]
            return f"rows of {shape.hidden_size}, it takes up to {last}" + (
                f" in steps of {self.hidden_sizes.step}"
                if len(self.hidden_sizes) > 1
                else " and no others"
            )
        if shape.chosen > self.chosen:
            return f"{shape.chosen} experts per token, it takes {self.chosen}"
        if shape.num_slots % ranks or shape.num_slots > _MOST_EXPERTS:
            return (
                f"{shape.num_slots} experts on {ranks} ranks, it takes up to {_MOST_EXPERTS}, as "
                "many on each"
            )
        if shape.num_slots // ranks > self.experts_per_rank:
            return f"{shape.num_slots // ranks} experts per rank, it takes {self.experts_per_rank}"
        return None

    def most_tokens(self, ranks: int, shape: ExpertShape, buffer_bytes: int) -> int:
        """Of a rank in one call, as far as a group's buffer goes."""
        held, hidden = shape.num_slots // ranks, shape.hidden_size
        if self.has_expert_scales:
            room = buffer_bytes // 2 - 2 * _MIB
            per_token = ranks * min(held, shape.chosen) * hidden * 2
        else:
            room = (buffer_bytes - 2 * _MIB) // 2
            per_token = 2 * (hidden + 128) * (ranks * held + shape.chosen + 1)
        return max(0, min(self.tokens, room // per_token))


@dataclass(frozen=True, slots=True)
class Soc:
    """A family of NPUs.

    Args:
        generation: what deployments compare.
        versions: of the runtime.
        prefix: how its devices' names begin, in lower case.
        hccs_domain: within what NPUs reach each other's memory.
        devices_per_server: NPUs (on an A3: dies) of one host.
        fused_experts: what the ops for experts of several NPUs take.
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
    fused_experts: FusedExpertLimits
    transfer_alignment: int = 2 << 20
    latent_dims: tuple[tuple[int, int], ...] = ((512, 64),)
    block_size: int = 128
    has_nz_weights: bool = True


SOCS = (
    Soc(
        "A2",
        range(220, 226),
        "ascend910b",
        HccsDomain.SERVER,
        8,
        FusedExpertLimits((16, 32, 64), range(32, 7169, 32), 256, 16, 24, has_expert_scales=True),
    ),
    Soc(
        "A3",
        range(250, 256),
        "ascend910_93",
        HccsDomain.SUPER_NODE,
        16,
        FusedExpertLimits(
            (8, 16, 32, 64, 128, 144, 256, 288),
            range(7168, 7169),
            512,
            8,
            _MOST_EXPERTS,
            has_expert_scales=False,
        ),
    ),
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
