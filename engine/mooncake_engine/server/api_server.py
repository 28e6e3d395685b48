"""Runs one instance: binds its port, loads the engine, serves the API, drains on SIGTERM."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.applications import Starlette

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead, PortTaken
from mooncake_engine.kv_connector import resolve
from mooncake_engine.messages import EngineStats
from mooncake_engine.process.child_processes import StopSignals
from mooncake_engine.process.interpreter_watchdog import watched_interpreter
from mooncake_engine.sampling_defaults import read_sampling_defaults
from mooncake_engine.server.app import create_app
from mooncake_engine.server.guarded_connection import ConnectionLimits, GuardedConnection
from mooncake_engine.server.live_requests import LiveRequests
from mooncake_engine.server.registration import (
    Registration,
    check_registration,
    registration_of,
)
from mooncake_engine.server.request_tracing import Tracing, load_tracing
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.server.stats_log import StatsLog
from mooncake_engine.text.completion_output import EngineClient
from mooncake_engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

StartEngine = Callable[[EngineConfig], EngineClient]
"""Loads an engine; blocks until it is ready."""
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 5
"""How long clients may take to read the end of their responses."""


def check_kv_port(config: EngineConfig) -> None:
    """Raises PortTaken or ConfigError if the side channel can't have the port that it was given."""
    kv_transfer = config.kv_transfer
    if kv_transfer is not None and kv_transfer.port:
        host = resolve(kv_transfer.host, "--kv-host")
        bind(host, kv_transfer.port, option="--kv-port").close()


def check_before_loading(config: EngineConfig, host: str, options: ServerOptions) -> None:
    """What would be found wrong only once the model is there.

    Raises:
        PortTaken, ConfigError: it is.
    """
    check_kv_port(config)
    if str(defaults := read_sampling_defaults(config)):
        log.info("the model's own sampling defaults, for requests without: %s", defaults)
    check_registration(host, options)


def url_of(host: str, port: int) -> str:
    """Where requests from this machine reach a server that listens there."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in host else f"http://{reachable}:{port}"


def with_api_port(config: EngineConfig, port: int) -> EngineConfig:
    """Tell the engine which port is its API's: transports leave it alone."""
    if config.kv_transfer is None:
        return config
    return replace(config, kv_transfer=replace(config.kv_transfer, api_port=port))


def serve(
    config: EngineConfig,
    host: str,
    port: int,
    start_engine: StartEngine,
    options: ServerOptions | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests within the time of ``options``;
    a second signal ends it at once. To be called in the main thread.

    Prints ``ready http://HOST:PORT`` on standard output once requests are taken; ``port`` 0 takes
    a free one.

    Raises:
        PortTaken, ConfigError: before anything is loaded.
        CheckpointError, or whatever else keeps the engine from starting.
        EngineDead: it died while it served; every request has got an error.
    """
    options = options or ServerOptions()
    check_before_loading(config, host, options)
    with closing(bind(host, port)) as listener, open_tracing(config, options) as tracing:
        tokenizer = Tokenizer.load(config.model, config.chat_template)
        port = listener.getsockname()[1]
        config = with_api_port(config, port)
        with (
            closing(start_engine(config)) as engine,
            watched_interpreter(config.step_timeout_s),
        ):
            url = url_of(host, port)
            log.info("serving %s (%s) at %s", config.model_name, config.role.value, url)
            stats_log = StatsLog(engine.stats, options.log_stats_interval_s)
            live = LiveRequests()
            app = create_app(engine, tokenizer, options, tracing, live)
            draining = Draining(options.shutdown_timeout_s, live, partial(_held_by, engine))
            # What is loaded stays: full collections need not walk it while tokens wait.
            gc.collect()
            gc.freeze()
            with closing(registration_of(config.role, options, url)) as registration:
                background = _InstanceBackground(draining, engine, stats_log, registration)

                def on_ready() -> None:
                    announce(f"ready {url}")
                    registration.start()

                run_server(app, listener, background, on_ready)
            engine.check_health()


def _held_by(engine: EngineClient) -> int:
    return 0 if is_dead(engine) else num_held(engine.stats())


def num_held(stats: EngineStats) -> int:
    """Finished prefills whose KV a peer may still fetch."""
    return int(stats.kv_transfer.get("leases_held", 0))


def is_dead(engine: EngineClient) -> bool:
    """Whether it serves nothing any more."""
    try:
        engine.check_health()
    except EngineDead:
        return True
    return False


@contextmanager
def open_tracing(config: EngineConfig, options: ServerOptions) -> Iterator[Tracing | None]:
    """Where spans are sent; None if they are not recorded."""
    if options.otlp_endpoint is None:
        yield None
        return
    with closing(load_tracing(options.otlp_endpoint, config.role)) as tracing:
        yield tracing


def bind(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket that owns the port, and takes no connections before the server listens on it.

    Args:
        option: where the port came from, for the message.

    Raises:
        PortTaken: the port is somebody else's.
        ConfigError: the host is not an address of this machine, or the port is not ours to take.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Only now is the port exclusive: Linux lets others with the option bind it until we listen.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as exc:
        listener.close()
        if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is in use: stop what holds it, or choose another {option}"
            ) from exc
        raise ConfigError(f"can't listen on {host} port {port}: {exc}") from exc
    return listener


class Background(Protocol):
    """What is looked at beside requests."""

    def stop(self, now: float) -> None:
        """A signal asks this process to end; in its handler.

        Args:
            now: in seconds of ``time.monotonic``, as below.
        """

    def tick(self, now: float) -> bool:
        """Whether it is time to end; asked ten times a second, in the event loop."""


@dataclass(frozen=True, slots=True)
class _InstanceBackground:
    draining: Draining
    engine: EngineClient
    stats_log: StatsLog
    registration: Registration

    def stop(self, now: float) -> None:
        self.draining.stop(now)

    def tick(self, now: float) -> bool:
        if self.draining.is_asked:
            self.registration.leave()
        if self.draining.is_over(now):
            return True
        # Whoever started us starts a process that has ended; one that only says 503 stays as it is.
        if is_dead(self.engine):
            return True
        self.stats_log.tick(now)
        return False


class _Server(uvicorn.Server):
    """Says when it takes requests, and takes none from the first signal on. It listens up to the
    end all the same, so that those who come late are told."""

    def __init__(
        self, config: uvicorn.Config, background: Background, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._background = background

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._background.stop(time.monotonic())

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._background.tick(time.monotonic())


def announce(line: str) -> None:
    """Tell whoever started us; that the disk under standard output is full keeps nobody from
    being served."""
    try:
        print(line, flush=True)  # noqa: T201  # that is what it is for
    except OSError as exc:
        log.warning("can't write to standard output: %s", exc)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it is flushed again at the end


def run_server(
    app: Starlette,
    listener: socket.socket,
    background: Background,
    on_ready: Callable[[], None],
) -> None:
    """Serve an application until its background says that it is time to end.

    Args:
        app: what is served.
        listener: of ``bind``.
        background: looked at meanwhile.
        on_ready: called once requests are taken.
    """
    GuardedConnection.limits = ConnectionLimits.for_process()
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=GuardedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # who sent a request says where its metaserver may be
        backlog=2048,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )
    server = _Server(config, background, on_ready)
    # uvicorn puts its own in front of these while it runs.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    # From here on listening keeps others off the port. Connections inherit the option: without it,
    # those that end at this side would keep a restarted instance from its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.run(sockets=[listener])


class Waiting(Protocol):
    """The requests whose clients wait: one server's ``LiveRequests``, or those of all workers."""

    def __len__(self) -> int: ...

    def close(self) -> None: ...

    def cut_off(self) -> None: ...


class Draining:
    """Decides when an instance that was asked to stop may end.

    Args:
        timeout_s: how long running requests may continue.
        live: the requests whose clients wait.
        num_held: how many finished prefills wait for a peer to fetch their KV.
    """

    def __init__(self, timeout_s: float, live: Waiting, num_held: Callable[[], int]) -> None:
        self._timeout_s = timeout_s
        self._live = live
        self._num_held = num_held
        self._signals = StopSignals()
        self._is_told = False
        self._was_idle = False

    def stop(self, now: float) -> None:
        """A signal came at ``now`` (``time.monotonic``): a second one wants the end at once. To be
        called from a signal handler."""
        if self._signals.note(now):
            self._live.close()

    @property
    def is_asked(self) -> bool:
        """Whether a signal came."""
        return self._signals.asked_at is not None

    def is_over(self, now: float) -> bool:
        """Whether there is nothing left to wait for, or no time left. What still runs is ended
        with an error then; its clients have yet to be told. To be asked again and again."""
        asked_at = self._signals.asked_at
        if asked_at is None:
            return False
        num_live, num_held = len(self._live), self._num_held()
        # Another thread counts the KV of a finished prefill, maybe after its response: look twice.
        was_idle, self._was_idle = self._was_idle, not num_live and not num_held
        if self._was_idle:
            return was_idle
        if not self._is_told:
            self._is_told = True
            log.info(
                "no new requests: %d run, peers have yet to fetch the KV of %d; at most %g s",
                *(num_live, num_held, self._timeout_s),
            )
        if not self._signals.is_hurried and now - asked_at < self._timeout_s:
            return False
        log.warning("%d requests are cut off, the KV of %d is given up", num_live, num_held)
        self._live.cut_off()
        return True
