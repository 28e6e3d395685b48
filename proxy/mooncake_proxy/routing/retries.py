"""Limits of retries: a retry budget, and a quarantine for requests that seem to crash instances."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b


class RetryBudget:
    """Every request deposits `ratio`, every retry takes 1; `reserve` allows a few at any time.

    When single instances fail, the budget covers all retries; when everything fails, traffic grows
    by `ratio` instead of multiplying (after Finagle's RetryBudget).
    """

    __slots__ = ("_balance", "_limit", "_ratio")

    def __init__(self, ratio: float, reserve: int) -> None:
        self._ratio = ratio
        self._limit = float(max(reserve, 1) * 10)
        self._balance = float(reserve)

    def deposit(self) -> None:
        """Add to the budget for a new request."""
        balance = self._balance + self._ratio
        self._balance = balance if balance < self._limit else self._limit

    def take(self) -> bool:
        """Take one retry from the budget. Returns False if it is exhausted."""
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True


# A request is stopped after this many lost instances; its body is refused for QUARANTINE_S then.
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
    """Remembers for QUARANTINE_S the request bodies during which instances died or hung up.

    Without it, a request that crashes an engine would crash one instance per attempt. A body that
    was answered is removed, so that requests that just happened to be in flight during two restarts
    are not refused for long.
    """

    def __init__(self) -> None:
        # Keyed by body hash. Usually empty; callers check that to avoid hashing every body.
        self.by_hash: OrderedDict[bytes, _Suspect] = OrderedDict()
        # Publishes changes to other workers: key, instance, began, now.
        self.publish: Callable[[bytes, str, float, float], None] | None = None

    def note_loss(self, body: bytes, instance: str, began: float, now: float) -> int:
        """Note that an instance was lost while it worked on this body since loop time `began`.

        Requests with the same body that ran on the instance at the same time count as one loss.

        Returns:
            The number of losses so far.
        """
        key = _hash(body)
        if self.publish is not None:
            self.publish(key, instance, began, now)
        return self._note(key, instance, began, now)

    def apply(self, key: bytes, instance: str, began: float, now: float) -> None:
        """Apply a change that another worker has published.

        An empty `instance` means that the body was answered.
        """
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
        """Seconds for which this body will still be refused; 0.0 if it is not quarantined."""
        suspect = self.by_hash.get(_hash(body))
        if suspect is None or suspect.num_losses < MAX_LOSSES:
            return 0.0
        return max(0.0, suspect.latest + QUARANTINE_S - now)

    def clear(self, body: bytes) -> None:
        """Remove the suspicion: a request with this body was answered."""
        key = _hash(body)
        if self.by_hash.pop(key, None) is not None and self.publish is not None:
            self.publish(key, "", 0.0, 0.0)


def _hash(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
