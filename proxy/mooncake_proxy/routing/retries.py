"""When a request may be tried again: a retry budget, and requests that seem to kill instances."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b


class RetryBudget:
    """Every request deposits `ratio`, every retry takes 1; `reserve` allows a few at any time.

    When instances fail one by one, all retries fit; when everything fails, traffic grows by
    `ratio` instead of multiplying (after Finagle's RetryBudget).
    """

    __slots__ = ("_balance", "_limit", "_ratio")

    def __init__(self, ratio: float, reserve: int) -> None:
        self._ratio = ratio
        self._limit = float(max(reserve, 1) * 10)
        self._balance = float(reserve)

    def deposit(self) -> None:
        """One more request arrived."""
        balance = self._balance + self._ratio
        self._balance = balance if balance < self._limit else self._limit

    def take(self) -> bool:
        """Take one retry if the budget has one."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


# Instances that a request may lose before it is stopped, and for how long its body is refused then.
MAX_LOSSES = 2
QUARANTINE_S = 60.0
MAX_SUSPECTS = 1024


@dataclass(slots=True)
class _Suspect:
    num_losses: int = 0
    # Instance -> loop time of its latest loss.
    lost_at: dict[str, float] = field(default_factory=dict)
    latest: float = 0.0


class SuspectBodies:
    """Request bodies during which instances died or hung up, by hash, for QUARANTINE_S.

    A request that crashes an engine would crash one instance per attempt: failover must not spread
    it. A body that is answered is no suspect, so that requests in flight at two innocent restarts
    are not refused for long.
    """

    def __init__(self) -> None:
        # By the hash of their bodies. Mostly empty: then nothing needs to be hashed.
        self.by_hash: OrderedDict[bytes, _Suspect] = OrderedDict()
        # Passes what is noted here on to other workers: key, instance, began, now.
        self.publish: Callable[[bytes, str, float, float], None] | None = None

    def note_loss(self, body: bytes, instance: str, began: float, now: float) -> int:
        """An instance was lost while it worked on this body since `began`; returns the number of
        losses so far. Requests with one body that run there together are lost once."""
        key = _hash(body)
        if self.publish is not None:
            self.publish(key, instance, began, now)
        return self._note(key, instance, began, now)

    def follow(self, key: bytes, instance: str, began: float, now: float) -> None:
        """What another worker has noted; an empty instance: an answer."""
        if instance:
            self._note(key, instance, began, now)
        else:
            self.by_hash.pop(key, None)

    def _note(self, key: bytes, instance: str, began: float, now: float) -> int:
        suspect = self.by_hash.pop(key, None)
        if suspect is None or now - suspect.latest >= QUARANTINE_S:
            suspect = _Suspect()
        if began > suspect.lost_at.get(instance, -1.0):
            suspect.num_losses += 1
        suspect.lost_at[instance] = suspect.latest = now
        self.by_hash[key] = suspect
        if len(self.by_hash) > MAX_SUSPECTS:
            self.by_hash.popitem(last=False)
        return suspect.num_losses

    def quarantine_left(self, body: bytes, now: float) -> float:
        """For how many more seconds this body is refused; 0.0 if it is not."""
        suspect = self.by_hash.get(_hash(body))
        if suspect is None or suspect.num_losses < MAX_LOSSES:
            return 0.0
        return max(0.0, suspect.latest + QUARANTINE_S - now)

    def clear(self, body: bytes) -> None:
        """A request with this body was answered."""
        key = _hash(body)
        if self.by_hash.pop(key, None) is not None and self.publish is not None:
            self.publish(key, "", 0.0, 0.0)


def _hash(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
