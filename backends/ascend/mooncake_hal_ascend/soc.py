"""The table of differences between NPU families.

A family is found by the version that ``torch_npu.npu.get_soc_version()`` returns and by the
runtime's name of the device. All other code reads the attributes of a ``Soc``, which is looked up
once, and never branches on a generation's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from mooncake_hal.errors import BackendUnavailable
from mooncake_hal.fused_experts import ExpertShape

UNSUPPORTED_FAMILIES = {range(200, 206): "310P", range(260, 261): "950"}
"""Families that are known to be unsupported, by version."""


class HccsDomain(Enum):
    """The set of NPUs that HCCS connects: those of a server, or of a super-node."""

    SERVER = auto()
    SUPER_NODE = auto()


_MIB = 1 << 20
_MAX_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class FusedExpertLimits:
    """Limits of npu_moe_distribute_dispatch, from its documentation (Ascend Extension for PyTorch
    7.1). Groups and shapes outside these limits exchange rows by all-to-all.

    Args:
        ranks: supported group sizes.
        hidden_sizes: supported row sizes: the multiples of 32 up to a maximum, or a single size.
        tokens: maximum number of tokens per rank and call.
        chosen: maximum number of experts per token.
        experts_per_rank: maximum number of experts per rank.
        has_expert_scales: whether expert weights are sent along with rows. The size of the buffers
            is then computed by another formula, too.
    """

    ranks: tuple[int, ...]
    hidden_sizes: range
    tokens: int
    chosen: int
    experts_per_rank: int
    has_expert_scales: bool

    def unsupported_reason(self, ranks: int, shape: ExpertShape) -> str | None:
        """The limit that a group or shape exceeds, or None."""
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
        if shape.num_slots % ranks or shape.num_slots > _MAX_EXPERTS:
            return (
                f"{shape.num_slots} experts on {ranks} ranks, it takes up to {_MAX_EXPERTS}, "
                "equally many per rank"
            )
        if shape.num_slots // ranks > self.experts_per_rank:
            return f"{shape.num_slots // ranks} experts per rank, it takes {self.experts_per_rank}"
        return None

    def max_tokens(self, ranks: int, shape: ExpertShape, buffer_bytes: int) -> int:
        """The maximum number of tokens per rank and call, given the size of a group's buffer."""
        held, hidden = shape.num_slots // ranks, shape.hidden_size
        if self.has_expert_scales:
            available_bytes = buffer_bytes // 2 - 2 * _MIB
            per_token = ranks * min(held, shape.chosen) * hidden * 2
        else:
            available_bytes = (buffer_bytes - 2 * _MIB) // 2
            per_token = 2 * (hidden + 128) * (ranks * held + shape.chosen + 1)
        return max(0, min(self.tokens, available_bytes // per_token))


@dataclass(frozen=True, slots=True)
class Soc:
    """A family of NPUs.

    Args:
        generation: the family's name, which the compatibility check compares.
        versions: SoC versions of the family.
        prefix: prefix of its devices' names, in lower case.
        hccs_domain: the set of NPUs that can access each other's memory over HCCS.
        fused_experts: limits of the fused ops for expert parallelism.
        transfer_alignment: alignment of memory for HCCS, in bytes.
        latent_dims: (latent, rope) dimensions that latent attention supports.
        block_size: tokens per KV block of the attention ops.
        has_nz_weights: whether matrix products support weights in the private format NZ.
    """

    generation: str
    versions: range
    prefix: str
    hccs_domain: HccsDomain
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
        FusedExpertLimits((16, 32, 64), range(32, 7169, 32), 256, 16, 24, has_expert_scales=True),
    ),
    Soc(
        "A3",
        range(250, 256),
        "ascend910_93",
        HccsDomain.SUPER_NODE,
        FusedExpertLimits(
            (8, 16, 32, 64, 128, 144, 256, 288),
            range(7168, 7169),
            512,
            8,
            _MAX_EXPERTS,
            has_expert_scales=False,
        ),
    ),
)
"""The families that this backend supports."""


def find_soc(version: int, name: str) -> Soc:
    """Find the family of a device.

    Args:
        version: the device's SoC version.
        name: the runtime's name of the device.

    Raises:
        BackendUnavailable: the family is not in ``SOCS``, or name and version contradict each
            other.
    """
    soc = next((each for each in SOCS if version in each.versions), None)
    if soc is not None and name.lower().startswith(soc.prefix):
        return soc
    known = next(
        (family for versions, family in UNSUPPORTED_FAMILIES.items() if version in versions),
        "unknown",
    )
    family = soc.generation if soc else known
    wanted = ", ".join(
        f"{each.generation} ({each.prefix}*, {each.versions.start} to {each.versions.stop - 1})"
        for each in SOCS
    )
    raise BackendUnavailable(
        "ascend",
        f"device {name!r} has SoC version {version} ({family}); this backend runs {wanted}",
    )
