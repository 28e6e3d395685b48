"""What the numbers of an instance's KV mean, and how they were rounded: facts that peers compare.

Two engines may keep the same model's KV in memory of the same shape and mean something else by it:
rotated pairs here, rotated halves there. What differs in meaning is refused. What differs in
rounding is right on both sides and not the same to the last bit: it is said, and counted, and no
more; what it may do to answers is in ``docs/mixed.md``.
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
"""The fact by that name: whether rotated elements lie as pairs, or as halves."""
MAX_NOTED = 256
"""Peers that are remembered as said."""


class Numerics(msgspec.Struct, frozen=True):
    """Facts by name, in words that a person can compare. A fact that only one side states is not
    compared.

    Args:
        meaning: what has to be equal: the order of rotated elements, the scale of scores, the form
            of narrow types.
        rounding: what may differ: kernels, the type of intermediate values, ranks that sum up.
    """

    meaning: dict[str, str] = {}
    rounding: dict[str, str] = {}


def differences(ours: dict[str, str], theirs: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Facts that both state, and state otherwise: our value and theirs, by name."""
    common = sorted(ours.keys() & theirs.keys())
    return {name: (ours[name], theirs[name]) for name in common if ours[name] != theirs[name]}


def foreign_rope_order(own: Numerics, peer: Numerics) -> str:
    """The order in which a peer keeps the rope rows of latents, if it is known and not ours; else
    empty."""
    _, theirs = differences(own.meaning, peer.meaning).get(ROPE_ORDER, ("", ""))
    return theirs


class RoundingDifferences:
    """Peers whose KV is rounded otherwise than this instance's. Noted on the loop's thread.

    Attributes:
        num_peers: how many there were.
    """

    def __init__(self) -> None:
        self.num_peers = 0
        self._noted: OrderedDict[str, None] = OrderedDict()

    def noting(self, check: CompatibilityCheck) -> CompatibilityCheck:
        """The same check, which notes the peers that it accepts."""

        def checked(own: InstanceMetadata, peer: InstanceMetadata) -> tuple[str, ...]:
            transports = check(own, peer)
            self.note(own, peer)
            return transports

        return checked

    def note(self, own: InstanceMetadata, peer: InstanceMetadata) -> None:
        """Say once per peer what differs, if anything does."""
        found = differences(own.numerics.rounding, peer.numerics.rounding)
        if not found or peer.engine_id in self._noted:
            return
        self._noted[peer.engine_id] = None
        if len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)
        self.num_peers += 1
        facts = "; ".join(
            f"{name}: {ours} here, {theirs} there" for name, (ours, theirs) in found.items()
        )
        logger.info(
            "KV of instance %s is rounded otherwise than ours (%s): answers may differ where two "
            "tokens are nearly as likely, see docs/mixed.md",
            peer.engine_id,
            facts,
        )
