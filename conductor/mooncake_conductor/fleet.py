"""The fleet: all instances of one model as numpy columns by slot, and their prefill queues.

Policies evaluate all instances at once on these columns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_conductor.cost.link_calendar import LinkCalendar
from mooncake_conductor.errors import ConductorConfigError, UnknownInstance

Slots = NDArray[np.int64]
Values = NDArray[np.float64]


class Role(Enum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """The properties of an instance when it is added.

    Args:
        name: unique name.
        role: what it does.
        latency: its latency model.
        link_gb_s: bandwidth of its network link, in GB/s.
        host_gb_s: bandwidth from host to device memory, in GB/s.
        disk_gb_s: bandwidth of its disk, in GB/s.
        kv_tokens: tokens of KV that fit into its device memory.
        max_batch: sequences that it decodes at the same time.
    """

    name: str
    role: Role
    latency: LatencyModel
    link_gb_s: float = 87.0
    host_gb_s: float = 128.0
    disk_gb_s: float = 6.0
    kv_tokens: int = 1_000_000
    max_batch: int = 256


class Fleet:
    """All instances of one model.

    Args:
        num_slots: most instances at the same time.
        chunk_tokens: tokens per chunk of the index.
        kv_bytes_per_token: KV bytes per token of the model.
        num_layers: layers of the model; KV is loaded and sent layer by layer.
        setup_s: setup time of a transfer, in seconds.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        chunk_tokens: int,
        kv_bytes_per_token: float,
        num_layers: int,
        setup_s: float = 0.002,
    ) -> None:
        if min(num_slots, chunk_tokens, num_layers) < 1 or kv_bytes_per_token <= 0:
            raise ConductorConfigError("slots, chunk tokens, layers and KV bytes must be above 0")
        self.num_slots = num_slots
        self.chunk_tokens = chunk_tokens
        self.chunk_bytes = chunk_tokens * kv_bytes_per_token
        self.kv_bytes_per_token = kv_bytes_per_token
        self.num_layers = num_layers
        self.names: dict[int, str] = {}
        self.prefill_slots: Slots = np.zeros(0, np.int64)
        self.decode_slots: Slots = np.zeros(0, np.int64)
        self.prefill_mask = 0
        self.decode_mask = 0
        # Which instances can send prefixes to others, and which can fetch them.
        self.sender_mask = 0
        self.sends = np.zeros(num_slots, np.bool_)
        self.fetches = np.ones(num_slots, np.bool_)
        self.prefill = np.zeros((3, num_slots))
        self.step = np.zeros((3, num_slots))
        self.host_bytes_per_s = np.ones(num_slots)
        self.disk_bytes_per_s = np.ones(num_slots)
        self.kv_tokens = np.zeros(num_slots)
        self.max_batch = np.zeros(num_slots)
        self.links = LinkCalendar(np.ones(num_slots), setup_s)
        self.queues = PrefillQueues(num_slots)
        self.is_draining = np.zeros(num_slots, np.bool_)
        self.is_away = np.zeros(num_slots, np.bool_)
        self._roles: dict[int, Role] = {}
        self._sends_prefixes: dict[int, bool] = {}  # set by `share_prefixes`, else the role decides
        self._prefill_costs = self.prefill[:, self.prefill_slots]

    def add(self, spec: InstanceSpec) -> int:
        """Add an instance. Returns its slot.

        Raises:
            ConductorConfigError: the name is in use, or all slots are.
        """
        if spec.name in self.names.values():
            raise ConductorConfigError(f"there is an instance {spec.name!r} already")
        free = next((slot for slot in range(self.num_slots) if slot not in self.names), None)
        if free is None:
            raise ConductorConfigError(f"all {self.num_slots} slots are taken")
        self.names[free] = spec.name
        self._roles[free] = spec.role
        self.set_latency(free, spec.latency)
        self.links.bytes_per_s[free] = spec.link_gb_s * 1e9
        self.host_bytes_per_s[free] = spec.host_gb_s * 1e9
        self.disk_bytes_per_s[free] = spec.disk_gb_s * 1e9
        self.kv_tokens[free] = spec.kv_tokens
        self.max_batch[free] = spec.max_batch
        self._list_roles()
        return free

    def remove(self, slot: int, now: float) -> None:
        """Remove an instance; its slot can be reused.

        Raises:
            UnknownInstance: the slot is empty.
        """
        if slot not in self.names:
            raise UnknownInstance(f"no instance in slot {slot}")
        del self.names[slot], self._roles[slot]
        self._sends_prefixes.pop(slot, None)
        self.fetches[slot] = True
        self.is_draining[slot] = self.is_away[slot] = False
        self.links.clear(slot, now)
        self.queues.clear(slot)
        self._list_roles()

    def role(self, slot: int) -> Role:
        """The role of an instance.

        Raises:
            UnknownInstance: the slot is empty.
        """
        if slot not in self._roles:
            raise UnknownInstance(f"no instance in slot {slot}")
        return self._roles[slot]

    def share_prefixes(self, slot: int, *, sends: bool, fetches: bool) -> None:
        """Set whether an instance can send its prefixes to others, and fetch theirs.

        By default all instances fetch, and those that prefill send.
        """
        if (self._sends_prefixes.get(slot), bool(self.fetches[slot])) == (sends, fetches):
            return
        self._sends_prefixes[slot], self.fetches[slot] = sends, fetches
        self._list_roles()

    def drain(self, slot: int, is_draining: bool = True) -> None:
        """Start or stop to drain an instance: it gets no new requests while it drains."""
        self.is_draining[slot] = is_draining
        self._list_roles()

    def set_away(self, slot: int, is_away: bool = True) -> None:
        """Mark an instance as away: it is not chosen until it is back.

        Requests bound to it stay bound, and count as its load again when it is back.
        """
        if bool(self.is_away[slot]) is not is_away:
            self.is_away[slot] = is_away
            self._list_roles()

    def set_role(self, slot: int, role: Role) -> None:
        """Set the role of an instance, which must be idle."""
        self.role(slot)
        self._roles[slot] = role
        self.is_draining[slot] = False
        self._list_roles()

    def slots_of(self, mask: int) -> Slots:
        """The slots whose bits are set in `mask`, lowest first."""
        raw = np.frombuffer(mask.to_bytes((self.num_slots + 7) // 8, "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(raw, bitorder="little"))

    def set_latency(self, slot: int, latency: LatencyModel) -> None:
        """Set the latency model of an instance, and rescale the prefills queued there."""
        before = self.prefill[:, slot].tolist()
        self.prefill[:, slot] = latency.prefill_coefficients
        if tuple(before) != latency.prefill_coefficients:
            self.queues.rescale(slot, lambda tokens: _ratio(before, latency, tokens))
        self.step[:, slot] = latency.step_coefficients
        self._gather_costs()

    def prefill_seconds(self, slot: int, num_tokens: int, num_reused: int) -> float:
        """Seconds that an instance would compute on a prompt."""
        fixed, per_token, squared = self.prefill[:, slot].tolist()
        pairs = num_tokens * num_tokens - num_reused * num_reused
        return float(fixed + per_token * (num_tokens - num_reused) + squared * pairs)

    def all_prefill_seconds(self, num_tokens: int, num_reused: Values) -> Values:
        """Seconds that each prefill instance would compute on a prompt.

        Args:
            num_tokens: tokens of the prompt.
            num_reused: tokens that are reused, ``[..., prefill instances]``.
        """
        fixed, per_token, squared = self._prefill_costs
        computed = num_tokens - num_reused
        # n² − p² = (n − p) · (n + p)
        return fixed + computed * (per_token + squared * (num_tokens + num_reused))  # type: ignore[no-any-return]  # numpy's sums of rows

    def step_seconds(self, slots: Slots, num_sequences: Values, num_context: Values) -> Values:
        """Seconds of a decode step on each of these instances."""
        step, per_sequence, per_context = self.step[:, slots]
        others = np.maximum(num_sequences - 1, 0)
        return step + per_sequence * others + per_context * num_context  # type: ignore[no-any-return]  # numpy's sums of rows

    def unloaded_seconds(self, num_tokens: int, num_output_tokens: float) -> tuple[float, float]:
        """Seconds of a request's first token and of each further one on the fastest idle instances.

        Infinite if there is no prefill or no decode instance.
        """
        slots = self.decode_slots
        prefill = self.all_prefill_seconds(num_tokens, np.zeros(1))
        context = np.full(len(slots), num_tokens + num_output_tokens / 2)
        step = self.step_seconds(slots, np.ones(len(slots)), context)
        return float(prefill.min(initial=np.inf)), float(step.min(initial=np.inf))

    def _list_roles(self) -> None:
        roles = sorted(each for each in self._roles.items() if not self.is_away[each[0]])
        # A draining instance stays listed, because it still decodes what is bound to it; choosers
        # check `is_draining`.
        takes_prefills = [slot for slot, role in roles if role is not Role.DECODE]
        prefill = [slot for slot in takes_prefills if not self.is_draining[slot]] or takes_prefills
        decode = [slot for slot, role in roles if role is not Role.PREFILL]
        self.prefill_slots = np.array(prefill, np.int64)
        self.decode_slots = np.array(decode, np.int64)
        self.prefill_mask = sum(1 << slot for slot in prefill)
        self.decode_mask = sum(1 << slot for slot in decode)
        overrides = self._sends_prefixes
        senders = [slot for slot, _ in roles if overrides.get(slot, slot in prefill)]
        self.sends[:] = False
        self.sends[senders] = True
        self.sender_mask = sum(1 << slot for slot in senders)
        self._gather_costs()

    def _gather_costs(self) -> None:
        self._prefill_costs = self.prefill[:, self.prefill_slots]


def _ratio(before: Sequence[float], after: LatencyModel, num_tokens: int) -> float:
    """Ratio of the new to the old estimate for a prefill of `num_tokens`."""
    fixed, per_token, squared = before
    seconds = fixed + per_token * num_tokens + squared * num_tokens * num_tokens
    return after.prefill_seconds(num_tokens, 0) / seconds if seconds > 0 else 1.0


class PrefillQueues:
    """The FIFO prefill queues of all instances.

    Args:
        num_slots: slots of the fleet.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_requests = np.zeros(num_slots)
        self.num_tokens = np.zeros(num_slots)
        self._pending = np.zeros(num_slots)
        self._head = np.zeros(num_slots)
        self._head_since = np.zeros(num_slots)
        self._entries: list[OrderedDict[str, tuple[float, int]]] = [
            OrderedDict() for _ in range(num_slots)
        ]

    def seconds(self, slots: Slots, now: float) -> Values:
        """Seconds that a new prefill would wait on each of these instances."""
        spent = np.minimum(np.maximum(now - self._head_since[slots], 0.0), self._head[slots])
        return np.maximum(self._pending[slots] - spent, 0.0)

    def enter(
        self, slot: int, request_id: str, seconds: float, num_tokens: int, now: float
    ) -> None:
        """Queue a prefill of `seconds`, which computes `num_tokens`."""
        entries = self._entries[slot]
        entries[request_id] = (seconds, num_tokens)
        self._pending[slot] += seconds
        self.num_requests[slot] += 1
        self.num_tokens[slot] += num_tokens
        if len(entries) == 1:
            self._new_head(slot, now)

    def leave(self, slot: int, request_id: str, now: float) -> None:
        """Remove a prefill that is complete or cancelled. Idempotent."""
        entries = self._entries[slot]
        if request_id not in entries:
            return
        was_head = next(iter(entries)) == request_id
        seconds, num_tokens = entries.pop(request_id)
        self._pending[slot] -= seconds
        self.num_requests[slot] -= 1
        self.num_tokens[slot] -= num_tokens
        if was_head or not entries:
            self._new_head(slot, now)

    def rescale(self, slot: int, ratio_of: Callable[[int], float]) -> None:
        """Multiply the seconds of each queued prefill by `ratio_of` its tokens."""
        entries = self._entries[slot]
        if not entries:
            return
        for request_id, (seconds, num_tokens) in entries.items():
            entries[request_id] = (seconds * ratio_of(num_tokens), num_tokens)
        self._pending[slot] = sum(seconds for seconds, _ in entries.values())
        self._head[slot] = next(iter(entries.values()))[0]

    def clear(self, slot: int) -> None:
        """Empty the queue of an instance."""
        self._entries[slot].clear()
        for column in (self.num_requests, self.num_tokens, self._pending, self._head):
            column[slot] = 0.0

    def _new_head(self, slot: int, now: float) -> None:
        entries = self._entries[slot]
        if not entries:
            self._pending[slot] = 0.0  # drop accumulated rounding errors
        self._head[slot] = next(iter(entries.values()))[0] if entries else 0.0
        self._head_since[slot] = now
