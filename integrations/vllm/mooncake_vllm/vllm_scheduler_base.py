"""What vLLM asks the scheduler sides of the connectors, and what all of them share: the link to the
ranks, the watch on vLLM's steps, and their death."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mooncake_kv.connector_worker import PushStep
from mooncake_kv.kv_events import KVEvent
from mooncake_kv.model_fingerprint import ModelFingerprint
from mooncake_kv.params import KVTransferDict
from mooncake_vllm.errors import ConnectorDied
from mooncake_vllm.rank_link import Ranks
from mooncake_vllm.vllm_interface import BlockPool, KVCacheBlocks, Request, SchedulerOutput

logger = logging.getLogger(__name__)

STALLED_SHARE = 0.5
"""Fraction of vLLM's step timeout after which keepalives are suspended, so that peers stop holding
KV for this instance."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Properties of this instance that are known before the ranks are connected.

    Args:
        engine_id: name of this epoch.
        model: fingerprint of the model.
        num_ranks: number of ranks in all pipeline stages.
        max_model_len: maximum tokens of a request, prompt and answer.
        sends, loads: what its ``kv_role`` allows.
        step_timeout_s: vLLM's timeout of a step, in seconds.
    """

    engine_id: str
    model: ModelFingerprint
    num_ranks: int
    max_model_len: int
    sends: bool
    loads: bool
    step_timeout_s: float = 300.0


class StepWatch:
    """Detects that a step takes so long that peers need not hold KV for this instance.

    vLLM's loop schedules one or more steps, waits for the results of the first, and schedules the
    next for as long as it has requests, including requests that wait for KV. Without requests it is
    idle, for however long. ``begin``, ``end`` and ``arrive`` are called on vLLM's thread.

    Args:
        limit_s: time without results after which a step counts as stalled, in seconds.
        clock: monotonic, in seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._num_open = 0
        self._changed_at = clock()

    def begin(self) -> None:
        """Record that a step is scheduled."""
        self._changed_at = self._clock()  # first, so that has_stalled never sees an old time
        self._num_open += 1

    def end(self) -> None:
        """Record that the results of the oldest step have arrived."""
        self._changed_at = self._clock()
        self._num_open = max(0, self._num_open - 1)

    def arrive(self) -> None:
        """Record that a request has arrived, after which vLLM is not idle any more."""
        self._changed_at = self._clock()

    def seconds_without_step(self) -> float:
        """How long no step has begun, since the latest result or request; 0 during steps. If
        requests wait, vLLM is paused, since it would begin one within milliseconds. Any thread."""
        return 0.0 if self._num_open else self._clock() - self._changed_at

    def has_stalled(self) -> bool:
        """Whether vLLM has waited for results for too long. Any thread."""
        return self._num_open > 0 and self._clock() - self._changed_at > self._limit_s


class SchedulerHooks(Protocol):
    """The interface that ``HalConnector`` calls on the scheduler side; see ``SchedulerSide``."""

    def on_new_request(self, request: Request) -> None: ...
    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> int | None: ...
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_tokens: int
    ) -> None: ...
    def hit_sources(self, request: Request, num_tokens: int) -> dict[str, int]: ...
    def take_started(self) -> tuple[str, ...]: ...
    @property
    def is_waiting(self) -> bool: ...
    @property
    def needs_steps(self) -> bool: ...
    def push_steps(self, step: SchedulerOutput) -> tuple[PushStep, ...]: ...
    def request_finished(
        self, request: Request, tables: Sequence[Sequence[int]]
    ) -> tuple[bool, KVTransferDict | None]: ...
    def reset_cache(self) -> bool: ...
    def bind_gpu_block_pool(self, pool: BlockPool) -> None: ...
    def take_events(self) -> Sequence[KVEvent]: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


class SchedulerSideBase:
    """What all scheduler sides share.

    Args:
        instance: properties of this instance.
        paths: Unix sockets of the workers, by rank.

    Raises:
        KVConfigError: the ranks did not connect or differ in their KV.
    """

    def __init__(self, instance: Instance, paths: Sequence[Path]) -> None:
        self._death: BaseException | None = None
        self._started: list[str] = []
        self._steps = StepWatch(STALLED_SHARE * instance.step_timeout_s)
        self._ranks = Ranks(paths, lambda reason: self._die(ConnectorDied(reason)))

    def check_alive(self) -> None:
        """Raise if the connector has died.

        Raises:
            ConnectorDied: it has; the cause is in the message.
        """
        if self._death is not None:
            raise ConnectorDied(f"the KV connector has died: {self._death!r}") from self._death

    def take_started(self) -> tuple[str, ...]:
        """Return the loads that were started since the last call, for the next step's metadata."""
        self.check_alive()
        self._steps.begin()
        started, self._started = tuple(self._started), []
        return started

    def _die(self, cause: BaseException) -> None:
        """Record and log why the connector can't continue; the first cause is kept. vLLM calls no
        hook while it is idle, so until its next request only the log tells. Any thread."""
        if self._death is None:
            logger.error(
                "the KV connector has died: %r; vLLM ends with its next step or request", cause
            )
        self._death = self._death or cause
