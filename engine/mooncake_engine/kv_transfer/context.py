"""What both halves of a connector work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from mooncake_engine.kv_transfer.events import EventSink
from mooncake_engine.kv_transfer.facts import InstanceFacts

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True)
class SideContext:
    """Facts and services.

    Args:
        facts: of this instance.
        lease_s: how long KV is held without a word from its reader.
        sink: hears of what ended.
        spawn: runs a task on the connector's loop; its failure is the engine's.
        clock: seconds, monotonic.
        can_revoke: whether a write ends with its writer, by every transport of this instance.
        landing_s: how long one may outlast its writer where it does not end with it.
    """

    facts: InstanceFacts
    lease_s: float
    sink: EventSink
    spawn: Spawn
    clock: Callable[[], float] = time.monotonic
    can_revoke: bool = True
    landing_s: float = 0.0


class Side:
    """One half of a connector, at one of the two ends. Loop thread only.

    Args:
        context: what both halves work with.
    """

    def __init__(self, context: SideContext) -> None:
        self._facts = context.facts
        self._lease_s = context.lease_s
        self._sink = context.sink
        self._spawn = context.spawn
        self._clock = context.clock
