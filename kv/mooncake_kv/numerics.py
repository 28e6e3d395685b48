"""Numerics of an instance's KV, which peers compare: what its numbers mean, and how they are
rounded.

Two engines may keep the same model's KV in memory of the same shape, but with different meanings,
such as rotated pairs in one and rotated halves in the other. A difference in meaning is refused. A
difference in rounding is correct on both sides, but not bit-identical: it is only logged and
counted. Its effect on answers is described in ``docs/mixed.md``.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from mooncake_kv.handshake import CompatibilityCheck, InstanceMetadata

logger = logging.getLogger(__name__)

ROPE_ORDER = "rope order"
"""Name of the property for the order of rotated elements: as pairs, or as halves."""
MAX_RECORDED = 256
"""Peers that are remembered, so that each is logged once."""


class Numerics(msgspec.Struct, frozen=True):
    """Properties by name, in human-readable form. A property that only one side states is not
    compared.

    Args:
        meaning: properties that must be equal: the order of rotated elements, the scale of scores,
            the format of narrow types.
        rounding: properties that may differ: kernels, the dtype of intermediate values, the ranks
            over which sums are reduced.
    """

    meaning: dict[str, str] = {}
    rounding: dict[str, str] = {}


def differences(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[str, str]]:
    """The properties that both sides state with different values: ours and theirs, by name."""
    common = sorted(ours.keys() & theirs.keys())
    return {name: (ours[name], theirs[name]) for name in common if ours[name] != theirs[name]}


def foreign_rope_order(own: Numerics, peer: Numerics) -> str:
    """The order in which a peer keeps the rope rows of latents, if it is known to differ from ours;
    otherwise empty."""
    _, theirs = differences(own.meaning, peer.meaning).get(ROPE_ORDER, ("", ""))
    return theirs


class RoundingDifferences:
    """Peers whose KV is rounded differently from this instance's. Written on the loop's thread.

    Attributes:
        num_peers: number of such peers so far.
    """

    def __init__(self) -> None:
        self.num_peers = 0
        self._recorded: OrderedDict[str, None] = OrderedDict()

    def noting(self, check: CompatibilityCheck) -> CompatibilityCheck:
        """Wrap a compatibility check so that it also notes the peers that it accepts."""

        def checked(own: InstanceMetadata, peer: InstanceMetadata) -> tuple[str, ...]:
            transports = check(own, peer)
            self.note(own, peer)
            return transports

        return checked

    def note(self, own: InstanceMetadata, peer: InstanceMetadata) -> None:
        """Log the differences to a peer, if any, once."""
        found = differences(own.numerics.rounding, peer.numerics.rounding)
        if not found or peer.engine_id in self._recorded:
            return
        self._recorded[peer.engine_id] = None
        if len(self._recorded) > MAX_RECORDED:
            self._recorded.popitem(last=False)
        self.num_peers += 1
        described = "; ".join(
            f"{name}: {ours} here, {theirs} there" for name, (ours, theirs) in found.items()
        )
        logger.info(
            "KV of instance %s is rounded differently from ours (%s): answers may differ where two "
            "tokens are almost equally likely, see docs/mixed.md",
            peer.engine_id,
            described,
        )
