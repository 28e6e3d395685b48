"""The instances that can't exchange KV with this one, whoever of the two found out."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

REMEMBERED_REFUSALS = 256


class Refusals:
    """Incarnations whose handshake was refused. Facts don't change in an instance's life, so that
    such a pair never fits. Noted on the loop's thread, read on any.

    Attributes:
        engine_ids: the latest ones.
        num_peers: all there ever were.
    """

    def __init__(self) -> None:
        self.engine_ids: tuple[str, ...] = ()
        self.num_peers = 0

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self.engine_ids

    def note(self, engine_id: str, reason: str) -> None:
        """Remember a peer, and say so once."""
        if engine_id in self.engine_ids:
            return
        self.engine_ids = (*self.engine_ids, engine_id)[-REMEMBERED_REFUSALS:]
        self.num_peers += 1
        logger.error(
            "instance %s and this one can't exchange KV for as long as both run: %s. Each request "
            "that is sent across them is prefilled twice: restart one of the two with settings "
            "that fit the other, or take one out of the proxy's pools",
            engine_id,
            reason,
        )

    def level(self, engine_id: str) -> int:
        """How loudly to log that a request's KV did not come across: of a refused peer all has
        been said."""
        return logging.INFO if engine_id in self.engine_ids else logging.WARNING
