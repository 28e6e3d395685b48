"""The decode ledger: which requests decode on which instance, now and at a future time.

From it follows the load that a new request would meet on each decode instance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_conductor.cost.online_fit import RunningQuantile
from mooncake_conductor.fleet import Fleet, Slots, Values

DEFAULT_CLASS = "default"
_INITIAL_DECODE_S = 10.0


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Load of the decode instances at one time, in the order of the fleet's decode slots.

    Args:
        num_sequences: sequences in the decode batch.
        num_context: tokens of KV of these sequences.
    """

    num_sequences: Values
    num_context: Values


class DecodeLedger:
    """Every request between its reservation and its end, with its decode instance.

    Args:
        fleet: the instances.
        share: a request is expected to decode for this quantile of past decode durations.
    """

    def __init__(self, fleet: Fleet, *, share: float = 0.5) -> None:
        self._fleet = fleet
        self._share = share
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._classes: dict[str, int] = {}
        self._durations: list[RunningQuantile] = []
        self._slot = np.zeros(0, np.int64)
        self._class = np.zeros(0, np.int64)
        self._start = np.zeros(0)
        self._context = np.zeros(0)
        self._is_active = np.zeros(0, np.bool_)
        self._has_joined = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self._rows)

    def bind(
        self, request_id: str, slot: int, eta: float, num_tokens: int, request_class: str
    ) -> None:
        """Bind a request to the decode instance in `slot`, where it will decode from `eta` on."""
        if request_id in self._rows:
            self.release(request_id)
        row = self._free.pop() if self._free else self._grow()
        self._rows[request_id] = row
        self._slot[row], self._class[row] = slot, self._class_of(request_class)
        self._start[row], self._context[row] = eta, num_tokens
        self._is_active[row], self._has_joined[row] = True, False

    def join(self, request_id: str, now: float) -> None:
        """Note that the request decodes from now on."""
        row = self._rows.get(request_id)
        if row is not None:
            self._start[row], self._has_joined[row] = now, True

    def finish(self, request_id: str, now: float) -> None:
        """End a request that has completed; its decode duration is recorded for predictions."""
        row = self._rows.get(request_id)
        if row is not None and self._has_joined[row]:
            self._durations[self._class[row]].report(now - float(self._start[row]))
        self.release(request_id)

    def release(self, request_id: str) -> None:
        """Remove a request, however it has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._is_active[row] = False
            self._free.append(row)

    def now(self) -> DecodeLoad:
        """Load of the requests that decode now."""
        return self._count(self._is_active & self._has_joined)

    def reserved(self) -> DecodeLoad:
        """Load of all bound requests, whether they decode already or not."""
        return self._count(self._is_active)

    def at(self, time: float) -> DecodeLoad:
        """Expected load at a future `time`.

        It excludes requests that will have finished by then, by past decode durations, and includes
        those whose prefill will have ended.
        """
        if not self._rows:
            return self._count(self._is_active)
        expected = np.array([quantile.value for quantile in self._durations])
        will_end = self._start + expected[self._class]
        is_there = self._is_active & (self._start <= time)
        return self._count(is_there & ((will_end > time) | ~self._has_joined))

    def expected_seconds(self, request_class: str) -> float:
        """Expected decode duration of a request class, in seconds."""
        return self._durations[self._class_of(request_class)].value

    def _count(self, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> DecodeLoad:
        slots: Slots = self._slot[chosen]
        size = self._fleet.num_slots
        sequences = np.bincount(slots, minlength=size).astype(np.float64)
        weights = self._context[chosen]
        context = np.bincount(slots, weights=weights, minlength=size).astype(np.float64)
        decode = self._fleet.decode_slots
        return DecodeLoad(sequences[decode], context[decode])

    def _class_of(self, name: str) -> int:
        if name not in self._classes:
            self._classes[name] = len(self._durations)
            self._durations.append(RunningQuantile(self._share, _INITIAL_DECODE_S))
        return self._classes[name]

    def _grow(self) -> int:
        size = len(self._slot)
        added = max(size, 64)
        self._slot, self._class = (np.resize(c, size + added) for c in (self._slot, self._class))
        self._start, self._context = (
            np.concatenate([c, np.zeros(added)]) for c in (self._start, self._context)
        )
        no = np.zeros(added, np.bool_)
        self._is_active = np.concatenate([self._is_active, no])
        self._has_joined = np.concatenate([self._has_joined, no])
        self._free.extend(range(size + added - 1, size, -1))
        return size
