"""An engine without a model, for tests of the front end: it generates scripted tokens.

It implements the interface of ``AsyncEngine`` and records the front end's calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import EngineDead, Overloaded
from mooncake_engine.messages import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    ExpertLoad,
    FinishReason,
    StepSizes,
    TokenLogprobs,
    TokenUpdate,
)
from mooncake_engine.text.completion_output import OnUpdate
from mooncake_kv.connector import CompatibilityReport
from mooncake_kv.pool.pool_events import PoolStats, StoreReport
from mooncake_kv.store.chunk_store import StoreStats

EOS = 256
_FACTS = EngineInfo(256, 258, (EOS,), 64, 16, "fake-engine")
Script = Callable[[EngineRequest], Sequence[int]]


def upper_case(request: EngineRequest) -> list[int]:
    """Generates the prompt in capitals (bytes), then ends."""
    return [*bytes(request.prompt_token_ids).upper(), EOS]


def text_script(*texts: str | bytes) -> Script:
    """Generates these texts (bytes), then ends; of several texts, request ``-i`` gets text i."""
    encoded = [text.encode() if isinstance(text, str) else text for text in texts]

    def script(request: EngineRequest) -> list[int]:
        _, _, index = request.request_id.rpartition("-")
        return [*encoded[int(index) if len(encoded) > 1 else 0], EOS]

    return script


@dataclass
class FakeEngine:
    """Generates ``script(request)``, one token per update.

    Args:
        script: token ids of the answer, EOS included; with ``ignore_eos`` its end is the context's.
        refusal: raised on every submission.
        hold_at: requests are held before this token until ``release`` is set.
        die_at: the engine dies before this token.
        held_ids: suffix of the request ids that both apply to.
        room: number of requests that it admits at once.
    """

    script: Script = upper_case
    config: EngineConfig = field(default_factory=lambda: EngineConfig(model=Path("models/fake")))
    info: EngineInfo = _FACTS
    refusal: Exception | None = None
    death: EngineDead | None = None
    fail_at: int | None = None
    fail_as: FinishReason = FinishReason.ERROR
    late_at: int | None = None
    die_at: int | None = None
    hold_at: int | None = None
    held_ids: str = ""
    num_cached_tokens: int = 0
    num_leases: int = 0
    known_compatibility: CompatibilityReport | None = None
    kv_transfer: dict[str, float] = field(default_factory=lambda: {"bytes-received": 9.0})
    kv_pool: PoolStats | None = None
    pool_stores: tuple[StoreReport, ...] = ()
    pool_store: StoreStats | None = None
    experts: ExpertLoad | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    left_early: list[str] = field(default_factory=list)
    is_closed: bool = False
    is_busy: bool = False
    num_resets: int = 0
    room: int = 1024
    _live: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def check_capacity(self, num_requests: int) -> None:
        if num_requests > self.room:
            raise Overloaded(f"room for {self.room} requests; try again later")

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        self.seen.append(request)
        if self.refusal is not None:
            raise self.refusal
        generation = self._generate(self._updates(request), on_update)  # the script may raise, too
        self._live[request.request_id] = asyncio.create_task(generation)
        return request.request_id

    def unsubscribe(self, name: str) -> None:
        generation = self._live.pop(name, None)
        if generation is not None:
            self.left_early.append(name)
            generation.cancel()

    async def _generate(self, updates: Sequence[TokenUpdate], on_update: OnUpdate) -> None:
        try:
            for position, update in enumerate(updates):
                await self._interfere(update.request_id, position)
                if update.finish is not None:
                    del self._live[update.request_id]
                on_update(update)
        except EngineDead as exc:
            on_update(exc)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return not self.is_busy

    async def refresh(self) -> None:
        """Nothing to do: the statistics are always current."""

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=3,
            num_waiting=6,
            num_swapped=2,
            num_loading=1,
            step_sizes=StepSizes(70, [2, 0, 1, 0, 0, 0, 1, *[0] * 9]),
            kv_cache_usage=0.25,
            num_preemptions=5,
            num_swap_outs=4,
            prompt_tokens=7,
            kv_byte_seconds={"running": 30.0, "leased": 2.5},
            kv_transfer={"leases_held": self.num_leases, **self.kv_transfer},
            kv_pool=self.kv_pool,
            pool_store=self.pool_store,
            pool_stores=self.pool_stores,
            experts=self.experts,
        )

    def compatibility(self) -> CompatibilityReport | None:
        return self.known_compatibility

    def kv_event_endpoints(self) -> None:
        return None

    def topology(self) -> None:
        return None

    def check_ready(self) -> None:
        self.check_health()

    def check_health(self) -> None:
        if self.death is not None:
            raise self.death

    def close(self) -> None:
        self.is_closed = True

    async def _interfere(self, request_id: str, position: int) -> None:
        if request_id.endswith(self.held_ids):
            if position == self.hold_at:
                self.held.set()
                await self.release.wait()
            if position == self.die_at:
                raise EngineDead("the step loop ended: out of luck")
        await asyncio.sleep(0)

    def _updates(self, request: EngineRequest) -> list[TokenUpdate]:
        params = request.kv_transfer_params
        updates = self._plain_updates(request)
        if params.keeps_kv and updates[0].finish is not FinishReason.STOP:
            return [replace(updates[0], finish=FinishReason.LENGTH, **_handed_over(request))]
        if params.first_token is not None:
            assert updates[0].token_ids[0] == params.first_token.token_id
            if params.first_token.logprobs is None:
                updates[0] = replace(updates[0], logprobs=None)
        return updates

    def _plain_updates(self, request: EngineRequest) -> list[TokenUpdate]:
        sampling = request.sampling
        updates = _prompt_updates(request)
        for position, token_id in enumerate(self.script(request)):
            update = TokenUpdate(
                request.request_id, (token_id,), num_cached_tokens=self.num_cached_tokens
            )
            if sampling.logprobs is not None:
                update = replace(update, logprobs=(_logprobs(token_id, sampling.logprobs),))
            if position == self.fail_at:
                failed = TokenUpdate(request.request_id, finish=self.fail_as, error="bad luck")
                return [*updates, failed]
            if position == self.late_at:
                late = TokenUpdate(request.request_id, finish=FinishReason.TIMEOUT, error="late")
                return [*updates, late]
            if token_id == EOS and not sampling.ignore_eos:
                return [*updates, replace(update, finish=FinishReason.STOP, stop_token_id=EOS)]
            if position + 1 == sampling.max_tokens:
                return [*updates, replace(update, finish=FinishReason.LENGTH)]
            updates.append(update)
        assert sampling.ignore_eos, "the script must end with EOS"
        return [*updates[:-1], replace(updates[-1], finish=FinishReason.LENGTH)]  # as of a context


def _prompt_updates(request: EngineRequest) -> list[TokenUpdate]:
    """Log probabilities of the prompt, in two chunks, as after a chunked prefill."""
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return []
    scores = tuple(_logprobs(token_id, num_top) for token_id in request.prompt_token_ids[1:])
    chunks = [chunk for chunk in (scores[:2], scores[2:]) if chunk]
    return [TokenUpdate(request.request_id, prompt_logprobs=chunk) for chunk in chunks]


def _handed_over(request: EngineRequest) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "fake-engine",
        "remote_request_id": request.request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 4242,
        "remote_block_ids": [[0, 1]],
        "remote_block_size": 16,
        "num_prompt_tokens": len(request.prompt_token_ids),
    }
    return {"kv_transfer_params": params}


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The sampled token ranks first, followed by its neighbours."""
    top = tuple(((token_id + i) % 256, -0.5 - i) for i in range(num_top))
    return TokenLogprobs(token_id, -0.5, top, rank=1)
