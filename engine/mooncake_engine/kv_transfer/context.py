"""What both halves of a connector work with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from mooncake_engine.errors import HandshakeRefused
from mooncake_engine.kv_transfer.events import EventSink
from mooncake_engine.kv_transfer.facts import InstanceFacts, check_fit
from mooncake_engine.kv_transfer.protocol import Hello, check_version
from mooncake_engine.kv_transfer.refusals import Refusals

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
        refusals: the peers that don't fit; both halves' and those who ask for them.
    """

    facts: InstanceFacts
    lease_s: float
    sink: EventSink
    spawn: Spawn
    clock: Callable[[], float] = time.monotonic
    can_revoke: bool = True
    landing_s: float = 0.0
    refusals: Refusals = field(default_factory=Refusals)


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
        self._refusals = context.refusals

    def _check_hello(self, hello: Hello, *, prefill: InstanceFacts, decode: InstanceFacts) -> None:
        """Judge a peer that asks; one of the two is the peer's facts.

        Raises:
            HandshakeRefused: it does not fit, which is remembered.
        """
        try:
            check_version(hello.version)
            check_fit(prefill, decode)
        except HandshakeRefused as exc:
            self._refusals.note(hello.facts.engine_id, str(exc))
            raise
