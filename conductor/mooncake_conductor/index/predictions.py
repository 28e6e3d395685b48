"""Predictions: chunks that instances will hold soon, computed or fetched for placed requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat


@dataclass(slots=True, eq=False)
class Prediction:
    """The chunks that one request will leave on an instance.

    Args:
        slot: slot of the instance.
        keys: keys of the chunks; empty once the prediction has ended.
        ready_at: time at which the chunks will be available.
        expires_at: time at which the prediction ends.
    """

    slot: int
    keys: Sequence[int]
    ready_at: float
    expires_at: float


class Predictions:
    """All predictions. A chunk may have several; it is expected until the last of them has ended.

    A prediction ends when it is retracted, when its chunks are stored, or when it expires.

    Args:
        num_slots: most instances at the same time.
    """

    def __init__(self, num_slots: int) -> None:
        self._masks: dict[int, int] = {}
        self._by_slot: list[dict[int, tuple[Prediction, ...]]] = [{} for _ in range(num_slots)]
        self._order: deque[Prediction] = deque()

    def __len__(self) -> int:
        """Number of chunks that are expected on any instance."""
        return len(self._masks)

    def add(self, slot: int, keys: Sequence[int], ready_at: float, expires_at: float) -> Prediction:
        """Add a prediction."""
        prediction = Prediction(slot, keys, ready_at, expires_at)
        expected, masks, bit = self._by_slot[slot], self._masks, 1 << slot
        alone = (prediction,)
        for key in keys:
            others = expected.get(key)
            if others is None:
                expected[key] = alone
                masks[key] = masks.get(key, 0) | bit
            else:
                expected[key] = (*others, prediction)
        self._order.append(prediction)
        return prediction

    def retract(self, prediction: Prediction) -> None:
        """End a prediction. Idempotent."""
        keys, prediction.keys = prediction.keys, ()
        expected = self._by_slot[prediction.slot]
        ended = []
        for key in keys:
            predictions = expected.get(key, ())
            left = tuple(each for each in predictions if each is not prediction)
            if left:
                expected[key] = left
            elif predictions:
                ended.append(key)
        self._forget(prediction.slot, ended)

    def awaits(self, slot: int) -> bool:
        """Whether any chunk is expected on an instance."""
        return bool(self._by_slot[slot])

    def arrived(self, slot: int, keys: Iterable[int]) -> None:
        """Drop the predictions of chunks that an instance holds now."""
        expected = self._by_slot[slot]
        self._forget(slot, [key for key in keys if key in expected])

    def drop_slot(self, slot: int) -> None:
        """Drop all predictions of an instance."""
        self._forget(slot, list(self._by_slot[slot]))

    def masks(self, keys: Sequence[int], now: float) -> list[int] | None:
        """Bit masks of the slots that are expected to hold each chunk; None if all are empty."""
        self._expire(now)
        if not self._masks:
            return None
        masks = list(map(self._masks.get, keys, repeat(0)))
        return masks if any(masks) else None

    def ready_at(self, key: int, slot: int) -> float:
        """Earliest predicted time at which an instance will hold a chunk; 0 without prediction."""
        predictions = self._by_slot[slot].get(key, ())
        return min((prediction.ready_at for prediction in predictions), default=0.0)

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
        """End expired predictions, in the order of their creation.

        One that expires before an older one ends only after that.
        """
        while self._order and (self._order[0].expires_at <= now or not self._order[0].keys):
            self.retract(self._order.popleft())
