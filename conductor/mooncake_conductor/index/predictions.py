"""Chunks that instances will hold soon: computed or fetched for a request that was placed there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat


@dataclass(slots=True, eq=False)
class Prediction:
    """What one request is going to leave on an instance.

    Args:
        slot: of the instance.
        keys: of the chunks; none once it has ended.
        ready_at: when they will be there.
        expires_at: after which nobody counts on it.
    """

    slot: int
    keys: Sequence[int]
    ready_at: float
    expires_at: float


class Predictions:
    """Several requests may promise the same chunk: it is expected until the last of them has ended.

    A prediction ends by retraction, when its chunks have come, or when it expires.

    Args:
        num_slots: how many instances there can be.
    """

    def __init__(self, num_slots: int) -> None:
        self._masks: dict[int, int] = {}
        self._by_slot: list[dict[int, tuple[Prediction, ...]]] = [{} for _ in range(num_slots)]
        self._order: deque[Prediction] = deque()

    def __len__(self) -> int:
        """Chunks that are expected anywhere."""
        return len(self._masks)

    def add(self, slot: int, keys: Sequence[int], ready_at: float, expires_at: float) -> Prediction:
        """These chunks will be there."""
        made = Prediction(slot, keys, ready_at, expires_at)
        expected, masks, bit = self._by_slot[slot], self._masks, 1 << slot
        alone = (made,)
        for key in keys:
            others = expected.get(key)
            if others is None:
                expected[key] = alone
                masks[key] = masks.get(key, 0) | bit
            else:
                expected[key] = (*others, made)
        self._order.append(made)
        return made

    def retract(self, made: Prediction) -> None:
        """It will not come true, or has. Idempotent."""
        keys, made.keys = made.keys, ()
        expected = self._by_slot[made.slot]
        come = []
        for key in keys:
            promises = expected.get(key, ())
            left = tuple(promise for promise in promises if promise is not made)
            if left:
                expected[key] = left
            elif promises:
                come.append(key)
        self._forget(made.slot, come)

    def awaits(self, slot: int) -> bool:
        """Whether anything is expected there."""
        return bool(self._by_slot[slot])

    def arrived(self, slot: int, keys: Iterable[int]) -> None:
        """An instance holds these chunks now: nobody awaits them there any more."""
        expected = self._by_slot[slot]
        self._forget(slot, [key for key in keys if key in expected])

    def drop_slot(self, slot: int) -> None:
        """Nothing is expected of an instance any more."""
        self._forget(slot, list(self._by_slot[slot]))

    def masks(self, keys: Sequence[int], now: float) -> list[int] | None:
        """The slots that are expected to hold each chunk; None if there are none at all."""
        self._expire(now)
        if not self._masks:
            return None
        masks = list(map(self._masks.get, keys, repeat(0)))
        return masks if any(masks) else None

    def ready_at(self, key: int, slot: int) -> float:
        """When the first of those who promised a chunk will have it there; 0 if nobody did."""
        promises = self._by_slot[slot].get(key, ())
        return min((promise.ready_at for promise in promises), default=0.0)

    def _forget(self, slot: int, keys: Collection[int]) -> None:
        expected, masks, others = self._by_slot[slot], self._masks, ~(1 << slot)
        for key in keys:
            del expected[key]
            left = masks[key] & others
            if left:
                masks[key] = left
            else:
                del masks[key]

    def _expire(self, now: float) -> None:
        """Predictions of a longer life than those behind them wait for their turn."""
        while self._order and (self._order[0].expires_at <= now or not self._order[0].keys):
            self.retract(self._order.popleft())
