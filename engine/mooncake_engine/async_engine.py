"""The asyncio interface of the engine, which the API server uses: it runs a core on a thread, or
connects to one in another process, and delivers each request's updates to its event loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from mooncake_engine.admission import check_request
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_client import CoreClient
from mooncake_engine.core_messages import (
    AbortRequest,
    AddRequest,
    Command,
    Core,
    LoadProgress,
    PrepareGrammar,
    RefreshReport,
    ResetPrefixCache,
    Wake,
)
from mooncake_engine.errors import EngineDead, EngineStalled, InvalidRequest, Overloaded
from mooncake_engine.kv_connector import find_connector
from mooncake_engine.messages import EngineInfo, EngineRequest, EngineStats, TokenUpdate
from mooncake_engine.process.worker_counts import WorkerCounts
from mooncake_engine.step_watchdog import StepWatchdog
from mooncake_engine.text.completion_output import OnUpdate
from mooncake_engine.text.limits import check_prompt
from mooncake_engine.text.tokenizer import allow_torch_import
from mooncake_hal.command_line import collector_paused
from mooncake_hal.registry import Registry
from mooncake_kv.connector import CompatibilityReport, Topology
from mooncake_kv.kv_events import KVEventEndpoints
from mooncake_kv.params import TransferMode

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
_REFRESH_TIMEOUT_S = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Destination of a request's updates: a callback in its consumer's event loop."""

    loop: asyncio.AbstractEventLoop
    on_update: OnUpdate


_Batch = list[tuple[OnUpdate, TokenUpdate | EngineDead]]


class AsyncEngine:
    """Submits requests to a core and dispatches their updates. The core's steps and the caller's
    event loop never block each other.

    Args:
        core: core of this process, or connection to one in another; closed with this object.
        info: static facts about the engine.
        config: the engine's config.
        counts: request counts shared with the other API workers; None without any.
    """

    def __init__(
        self,
        core: Core,
        info: EngineInfo,
        config: EngineConfig,
        counts: WorkerCounts | None = None,
    ) -> None:
        self.config = config
        self._counts = counts or WorkerCounts()
        transfer = config.kv_transfer
        self._mode = find_connector(transfer.connector).mode if transfer else TransferMode.NONE
        self._core = core
        self._info = info
        self._streams: dict[str, _Stream] = {}
        self._pending_replies: set[Future[bool]] = set()
        self._lock = threading.Lock()
        self._failure: EngineDead | None = None
        self._last_group: str | None = None
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        self._watchdog = StepWatchdog(self._core.watch, self._give_up)

    @classmethod
    def start(
        cls, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None
    ) -> AsyncEngine:
        """Load a model and start the engine; blocks until it is ready.

        Args:
            config: the engine's config.
            on_progress: called with the stage of loading and the fraction of it that is done.

        Raises:
            ConfigError, CheckpointError: the engine can't be set up as configured.
        """
        loading = EngineLoad(config, on_progress)
        try:
            return loading.wait()
        except BaseException:
            loading.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Static facts about the engine."""
        return self._info

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenUpdate, None]:
        """Serve a request and yield its updates; ends after the update with ``finish``.

        Closing the iterator early aborts the request. The updates carry an id that the engine
        generates; ``abort`` takes that id, also for KV that is still held for a peer.

        Raises:
            InvalidRequest: the engine can't serve the request.
            Overloaded: too many requests are running and waiting.
            EngineDead, EngineStalled: the engine died, or a step seems to hang.
        """
        updates: asyncio.Queue[TokenUpdate | EngineDead] = asyncio.Queue()
        name = await self.submit(request, updates.put_nowait)
        try:
            while True:
                update = await updates.get()
                if isinstance(update, EngineDead):
                    raise type(update)(str(update)) from update.__cause__
                yield update
                if update.finish is not None:
                    return
        finally:
            self.unsubscribe(name)

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        """Submit a request; ``on_update`` receives its updates in the caller's event loop. See
        ``EngineClient``."""
        # the choices of a request are submitted one after another; their prompt is long
        is_sibling = request.group is not None and request.group == self._last_group
        if not is_sibling:
            check_prompt(request.prompt_token_ids, self._info, param="prompt")
        check_request(request, self._info, self._mode)
        self.check_ready()
        minted = replace(request, request_id=f"{request.request_id}-{secrets.token_hex(8)}")
        self._open(minted.request_id, on_update)
        try:
            grammar = request.sampling.grammar
            if grammar is not None and self._core.compiles_grammars and not is_sibling:
                await self._ask(partial(PrepareGrammar, grammar))
        except BaseException:
            self.unsubscribe(minted.request_id)
            raise
        self._last_group = request.group
        self._core.post(AddRequest(minted))
        return minted.request_id

    def unsubscribe(self, name: str) -> None:
        """Stop delivering a request's updates; it is aborted unless it has ended."""
        with self._lock:
            is_live = self._streams.pop(name, None) is not None
            self._count()
        if is_live:
            self.abort(name)

    def abort(self, request_id: str) -> None:
        """End a request, or stop holding its KV for a peer. Idempotent; any thread.

        Args:
            request_id: id from the request's updates, or from ``remote_request_id``.
        """
        self._core.post(AbortRequest(request_id))

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while any block is in use.

        Raises:
            EngineDead: the engine died.
        """
        return await self._ask(ResetPrefixCache)

    async def refresh(self) -> None:
        """Bring ``stats`` up to date, if the core replies within ``_REFRESH_TIMEOUT_S``."""
        if self._core.report_lags:
            with suppress(asyncio.TimeoutError, EngineDead):
                await asyncio.wait_for(self._ask(RefreshReport), _REFRESH_TIMEOUT_S)

    def stats(self) -> EngineStats:
        """Returns a snapshot for metrics. Any thread."""
        return self._core.report().stats

    def compatibility(self) -> CompatibilityReport | None:
        """Returns the peers it can't exchange KV with; None without a connector. Any thread."""
        return self._core.report().compatibility

    def kv_event_endpoints(self) -> KVEventEndpoints | None:
        """Returns the endpoints of its KV events; None if it publishes none. Any thread."""
        return self._core.report().kv_event_endpoints

    def topology(self) -> Topology | None:
        """Returns where peers reach this instance; None without a connector. Any thread."""
        return self._core.report().topology

    def check_health(self) -> None:
        """Raise EngineDead, with its first cause, if the core has died."""
        failure = self._failure
        if failure is not None:
            raise type(failure)(str(failure)) from failure.__cause__

    def check_ready(self) -> None:
        """Raise if requests should go to another instance: EngineDead if the core has died,
        EngineStalled if a step has been running for more than half of its timeout."""
        self.check_health()
        watch = self._core.watch
        if watch.has_stalled():
            raise EngineStalled(
                f"a step has been running for {watch.watched_s:.0f} s; at {watch.timeout_s:g} s "
                "(--step-timeout-seconds) this instance ends"
            )

    def close(self) -> None:
        """Stop the core and release its resources; live requests fail. Idempotent."""
        self._is_stopping = True
        self._core.post(Wake())
        self._thread.join(CLOSE_TIMEOUT_S)
        self._watchdog.close()

    async def _ask(self, command: Callable[[Callable[[bool], None]], Command]) -> bool:
        """Post a command and wait for its reply."""
        reply: Future[bool] = Future()
        reply.set_running_or_notify_cancel()  # the core also replies to callers that have left
        with self._lock:
            self._pending_replies.add(reply)
        try:
            self.check_health()
            self._core.post(command(partial(_reply, reply)))
            return await asyncio.wrap_future(reply)
        finally:
            with self._lock:
                self._pending_replies.discard(reply)

    def check_capacity(self, num_requests: int) -> None:
        """Check that the engine can take ``num_requests`` more requests. Any thread.

        To be called before a client's request for several answers is submitted: one that does not
        fit as a whole must not displace others until its last part is rejected.

        Raises:
            InvalidRequest: the engine can never take that many at once.
            Overloaded: it can't take them now.
        """
        limit = self._limit
        if num_requests > limit:
            raise InvalidRequest(
                f"{num_requests} choices were requested at once, for all prompts together, but at "
                f"most {limit} may run and wait here (--max-num-seqs, --max-queued-requests): "
                "request fewer"
            )
        self._check_sum(self._counts.num_in_engine, num_requests)

    @property
    def _limit(self) -> int:
        return self.config.max_num_seqs * self.config.dp_size + self.config.max_queued_requests

    def _check_sum(self, num_live: int, num_requests: int) -> None:
        if num_live + num_requests > self._limit:
            raise Overloaded(f"{num_live} requests are running or waiting already; try again later")

    def _count(self) -> None:
        """Publish the number of live requests to the other workers. The caller holds the lock."""
        self._counts.set_num_in_engine(len(self._streams))

    def _open(self, request_id: str, on_update: OnUpdate) -> None:
        stream = _Stream(asyncio.get_running_loop(), on_update)
        with self._lock:
            self.check_health()  # under the lock: ``fail`` notifies every stream that is open
            self._streams[request_id] = stream
            self._count()  # before the check, so that of two concurrent workers one sees the other
            try:
                self._check_sum(self._counts.num_in_engine - 1, 1)
            except Overloaded:
                del self._streams[request_id]
                self._count()
                raise

    def _run(self) -> None:
        """Main of the core's thread. Its failure is reported to all requests and health checks."""
        try:
            while not self._is_stopping:
                self._publish(self._core.step())
            self.fail(EngineDead("the engine was shut down"))
        except Exception as exc:  # stored, and raised in every request
            logger.critical("the engine died: %s", exc, exc_info=exc)
            dead = exc if isinstance(exc, EngineDead) else EngineDead(f"the engine died: {exc!r}")
            if dead is not exc:
                dead.__cause__ = exc
            self.fail(dead)
        finally:
            self._watchdog.close()
            self._core.close()

    def _give_up(self) -> None:
        """Give up a step that has timed out. Called on the watchdog's thread."""
        self.fail(self._core.abandon_step())

    def _publish(self, updates: list[TokenUpdate]) -> None:
        """Deliver a step's updates to their streams, with one call per event loop."""
        if not updates:
            return
        batches: defaultdict[asyncio.AbstractEventLoop, _Batch] = defaultdict(list)
        loop: asyncio.AbstractEventLoop | None = None
        with self._lock:
            for update in updates:
                stream = self._streams.get(update.request_id)
                if stream is None:
                    continue
                if stream.loop is not loop:  # usually all streams share one loop
                    loop = stream.loop
                    batch = batches[loop]
                batch.append((stream.on_update, update))
                if update.finish is not None:
                    del self._streams[update.request_id]
            self._count()
        for loop, batch in batches.items():
            _call(loop, batch)

    def fail(self, failure: EngineDead) -> None:
        """Report why the engine died to all requests and health checks. Any thread."""
        with self._lock:
            self._failure = self._failure or failure
            streams = list(self._streams.values())
            pending = list(self._pending_replies)
        for reply in pending:
            with suppress(InvalidStateError):  # the core has replied
                reply.set_exception(EngineDead(str(failure)))
        for stream in streams:
            _call(stream.loop, [(stream.on_update, failure)])


class EngineLoad:
    """An engine that is being loaded. A core in a process of its own loads from now on, while the
    caller does other work; one in this process loads in ``wait``.

    Args:
        config, on_progress: see ``AsyncEngine.start``.
    """

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._core = CoreClient(config) if has_core_process(config) else None

    def wait(self) -> AsyncEngine:
        """Block until the engine is ready; raises the errors of ``AsyncEngine.start``."""
        if self._core is not None:
            return AsyncEngine(self._core, self._core.wait_started(self._report).info, self._config)
        allow_torch_import()
        with collector_paused():
            from mooncake_engine.assembly import build_engine  # torch

        engine = build_engine(self._config, self._report)
        return AsyncEngine(engine.core, engine.info, self._config)

    def close(self) -> None:
        """Stop a core process that is not wanted any more. Idempotent."""
        if self._core is not None:
            self._core.close()

    def _report(self, progress: LoadProgress) -> None:
        if self._on_progress is not None:
            self._on_progress("loading weights", progress.fraction)


def has_core_process(config: EngineConfig) -> bool:
    """Whether the core runs in a process of its own. By default it does not on a CPU backend, which
    has no cores to spare for a second interpreter."""
    if config.core_process is not None:
        return config.core_process
    return bool(Registry.discover().device_type(config.backend))


def _reply(reply: Future[bool], value: bool) -> None:
    """Reply to a command, for the core. ``fail`` may come first, on another thread: a step that was
    given up may yet end."""
    with suppress(InvalidStateError):
        reply.set_result(value)


def _call(loop: asyncio.AbstractEventLoop, batch: _Batch) -> None:
    try:
        loop.call_soon_threadsafe(_deliver, batch)
    except RuntimeError:  # the consumer's event loop is closed, and with it its requests
        logger.debug("dropped %d updates of a closed event loop", len(batch))


def _deliver(batch: _Batch) -> None:
    for on_update, update in batch:
        on_update(update)
