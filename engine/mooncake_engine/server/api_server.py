"""Runs one instance: binds its port, loads the engine, serves the API and drains on SIGTERM.

``api_workers`` uses the same parts (``bind``, ``run_server``, ``Draining``) where several processes
serve the API.
"""

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

from mooncake_engine.async_engine import EngineLoad
from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineDead, PortInUse
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
from mooncake_hal.session.listener import tune
from mooncake_kv.allowed_hosts import is_loopback_host
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.io_loop import raise_descriptor_limit

logger = logging.getLogger(__name__)

LoadEngine = Callable[[EngineConfig], EngineLoad]
"""Begins to load an engine."""
_KEEP_ALIVE_S = 75
_GRACEFUL_SHUTDOWN_S = 5
"""Seconds that clients have to read the end of their responses when the server shuts down."""


def check_kv_port(config: EngineConfig) -> None:
    """Raises PortInUse or ConfigError if the configured port of the side channel is unusable."""
    kv_transfer = config.kv_transfer
    if kv_transfer is not None and kv_transfer.port:
        host = resolve(kv_transfer.host, "--kv-host")
        bind(host, kv_transfer.port, option="--kv-port").close()


def _warn_of_unreachable_kv(kv_transfer: KVTransferConfig, host: str) -> None:
    """Log a warning if other hosts reach the API, which listens on ``host``, but not the KV."""
    option = "--kv-advertise-host" if kv_transfer.advertise_host else "--kv-host"
    advertised = kv_transfer.advertise_host or kv_transfer.host
    if is_loopback_host(resolve(advertised, option)) and not is_loopback_host(host):
        logger.warning(
            "%s is %s while the API listens on %s: peers on other hosts can't exchange KV with "
            "this instance, and compute again what they should get from it; give the address of "
            "one interface, and --kv-secret-file",
            option,
            advertised,
            host,
        )


def _check_access(host: str, options: ServerOptions) -> None:
    """Log a warning if other hosts may send requests without a key.

    Raises:
        ConfigError: the environment says how vLLM would have checked keys.
    """
    if options.api_keys or is_loopback_host(host):
        return
    if os.environ.get("VLLM_API_KEY"):
        raise ConfigError(
            f"--host {host} without --api-key-file, while VLLM_API_KEY is set: it is not read "
            "here; put the key into a file for --api-key-file, or unset the variable"
        )
    logger.warning(
        "--host %s without --api-key-file: whoever reaches the port can send requests; give "
        "--api-key-file, or let only a proxy that checks keys reach it",
        host,
    )


def check_before_loading(config: EngineConfig, host: str, options: ServerOptions) -> None:
    """Check what would otherwise fail only after the model has been loaded.

    Raises:
        PortInUse: the port of the side channel is in use.
        ConfigError: the options can't be served.
    """
    _check_access(host, options)
    check_kv_port(config)
    if config.kv_transfer is not None:
        _warn_of_unreachable_kv(config.kv_transfer, host)
    if str(defaults := read_sampling_defaults(config)):
        logger.info("sampling defaults of the model: %s", defaults)
    check_registration(host, options)


def url_of(host: str, port: int) -> str:
    """The URL under which this machine reaches a server that listens on ``host`` and ``port``."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in host else f"http://{reachable}:{port}"


def with_api_port(config: EngineConfig, port: int) -> EngineConfig:
    """The configuration with the API's port, which transports must not use."""
    if config.kv_transfer is None:
        return config
    return replace(config, kv_transfer=replace(config.kv_transfer, api_port=port))


def serve(
    config: EngineConfig,
    host: str,
    port: int,
    load_engine: LoadEngine,
    options: ServerOptions | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the running requests within
    ``options.shutdown_timeout_s``. A second signal stops the server at once.

    Must be called in the main thread. Prints ``ready http://HOST:PORT`` to standard output once the
    server accepts requests.

    Args:
        config: the engine's configuration.
        host: the address to listen on.
        port: the port to listen on; 0 picks a free one.
        load_engine: begins to load the engine; the tokenizer is loaded meanwhile.
        options: the server's options; None for the defaults.

    Raises:
        PortInUse, ConfigError: raised before anything is loaded.
        CheckpointError: the engine can't start; it may raise other errors, too.
        EngineDead: the engine died while serving; every request has received an error.
    """
    options = options or ServerOptions()
    check_before_loading(config, host, options)
    with closing(bind(host, port)) as listener, open_tracing(config, options) as tracing:
        port = listener.getsockname()[1]
        config = with_api_port(config, port)
        with (
            _loaded(config, load_engine) as (engine, tokenizer),
            watched_interpreter(config.step_timeout_s),
        ):
            url = url_of(host, port)
            logger.info("serving %s (%s) at %s", config.model_name, config.role.value, url)
            stats_log = StatsLog(engine.stats, options.log_stats_interval_s)
            live = LiveRequests()
            app = create_app(engine, tokenizer, options, tracing, live)
            draining = Draining(options.shutdown_timeout_s, live, partial(_num_held_by, engine))
            # Loaded objects live as long as the process. Freezing them keeps full garbage
            # collections from walking them, which would delay tokens.
            gc.collect()
            gc.freeze()
            with closing(registration_of(config.role, options, url)) as registration:
                background = _InstanceBackground(draining, engine, stats_log, registration)

                def on_ready() -> None:
                    announce(f"ready {url}")
                    registration.start()

                run_server(app, listener, background, on_ready)
            engine.check_health()


@contextmanager
def _loaded(
    config: EngineConfig, load_engine: LoadEngine
) -> Iterator[tuple[EngineClient, Tokenizer]]:
    """The engine and the tokenizer. A core in a process of its own loads the model while this
    process loads the tokenizer; otherwise the tokenizer comes first, without torch."""
    with closing(load_engine(config)) as loading:
        tokenizer = Tokenizer.load(config.model, config.chat_template)
        with closing(loading.wait()) as engine:
            yield engine, tokenizer


def _num_held_by(engine: EngineClient) -> int:
    return 0 if is_dead(engine) else num_held(engine.stats())


def num_held(stats: EngineStats) -> int:
    """The number of finished prefills whose KV a peer may still fetch."""
    return int(stats.kv_transfer.get("leases_held", 0))


def is_dead(engine: EngineClient) -> bool:
    """Whether the engine has died."""
    try:
        engine.check_health()
    except EngineDead:
        return True
    return False


@contextmanager
def open_tracing(config: EngineConfig, options: ServerOptions) -> Iterator[Tracing | None]:
    """The tracing that the options ask for, closed at the end; None if they ask for none."""
    if options.otlp_endpoint is None:
        yield None
        return
    with closing(load_tracing(options.otlp_endpoint, config.role)) as tracing:
        yield tracing


def bind(
    host: str, port: int, *, option: str = "--port", shares_port: bool = False
) -> socket.socket:
    """Bind a socket that owns the port. It accepts no connections before the server listens on it.

    Args:
        option: the command-line option that set the port, for the error message.
        shares_port: other sockets with SO_REUSEPORT, of the same user, may have it, too.

    Raises:
        PortInUse: another process uses the port.
        ConfigError: the host is not an address of this machine, or binding the port is not
            permitted.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        # Clearing the option makes the port exclusive. Linux would otherwise let other sockets
        # with the option bind the same port until this one listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except (OSError, OverflowError) as exc:
        listener.close()
        if isinstance(exc, OSError) and exc.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use: stop the process that uses it, or choose "
                f"another {option}"
            ) from exc
        raise ConfigError(f"can't listen on {host} port {port}: {exc}") from exc
    return listener


class Background(Protocol):
    """Periodic work of a server process, and the decision when to stop. Times are in seconds of
    ``time.monotonic``."""

    def stop(self, now: float) -> None:
        """Handle a signal that asks this process to stop. Runs in the signal handler."""

    def tick(self, now: float) -> bool:
        """Do the periodic work; returns whether the server should stop. The event loop calls it ten
        times per second."""


@dataclass(frozen=True, slots=True)
class _InstanceBackground:
    """The ``Background`` of an instance with one server process: drains, registers with proxies,
    and logs statistics."""

    draining: Draining
    engine: EngineClient
    stats_log: StatsLog
    registration: Registration

    def stop(self, now: float) -> None:
        self.draining.stop(now)

    def tick(self, now: float) -> bool:
        if self.draining.is_requested:
            self.registration.unregister()
        if self.draining.is_over(now):
            return True
        # A service manager restarts a process that exits, but not one that only responds with 503.
        if is_dead(self.engine):
            return True
        self.stats_log.tick(now)
        return False


class _Server(uvicorn.Server):
    """A uvicorn server that calls ``on_ready`` once it accepts requests and leaves signals to its
    background. It keeps listening until it stops, so that late clients receive an error response
    rather than a refused connection."""

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
    """Print a line for the parent process on standard output. A failed write, such as to a full
    disk, is only logged: it must not keep the instance from serving."""
    try:
        print(line, flush=True)  # noqa: T201  # the parent process reads it
    except OSError as exc:
        logger.warning("can't write to standard output: %s", exc)
        # The interpreter flushes standard output again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def run_server(
    app: Starlette,
    listener: socket.socket,
    background: Background,
    on_ready: Callable[[], None],
) -> None:
    """Serve an application until ``background.tick`` returns true.

    Args:
        app: the application.
        listener: the socket that ``bind`` returned.
        background: the periodic work and the decision when to stop.
        on_ready: called once the server accepts requests.
    """
    raise_descriptor_limit()  # a shell's 1,024 would be too few for the connections
    GuardedConnection.limits = ConnectionLimits.for_process()
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=GuardedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # the peer's address says where its metaserver may be
        backlog=2048,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S,
    )
    server = _Server(config, background, on_ready)
    # uvicorn replaces these handlers with its own while it runs.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    # Once the socket listens, no other process can bind the port, so the option is safe again.
    # Accepted connections inherit it. Without it, connections closed from this side (TIME_WAIT)
    # would keep a restarted instance from binding its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited, too: a client whose host is gone says so to nobody, and the buffers of the kernel
    # take whole answers. Its requests end within a minute.
    tune(listener)
    server.run(sockets=[listener])


class DrainedRequests(Protocol):
    """The requests that clients are waiting for: the ``LiveRequests`` of one server, or those of
    all API workers."""

    def __len__(self) -> int: ...

    def close(self) -> None: ...

    def fail_all(self) -> None: ...


class Draining:
    """Decides when an instance that was asked to stop may exit.

    Args:
        timeout_s: how long running requests may continue, in seconds.
        live: the requests that clients are waiting for.
        num_held: returns the number of finished prefills whose KV a peer has yet to fetch.
    """

    def __init__(
        self, timeout_s: float, live: DrainedRequests, num_held: Callable[[], int]
    ) -> None:
        self._timeout_s = timeout_s
        self._live = live
        self._num_held = num_held
        self._signals = StopSignals()
        self._is_logged = False
        self._was_idle = False

    def stop(self, now: float) -> None:
        """Note a signal received at ``now`` (seconds of ``time.monotonic``). The second signal
        stops the instance at once. Safe to call from a signal handler."""
        if self._signals.note(now):
            self._live.close()

    @property
    def is_requested(self) -> bool:
        """Whether a signal was received."""
        return self._signals.requested_at is not None

    def is_over(self, now: float) -> bool:
        """Whether the instance may exit: nothing is left to wait for, or the timeout has passed.

        At the timeout, requests that still run are failed; the server has yet to send their error
        responses. Call this periodically."""
        requested_at = self._signals.requested_at
        if requested_at is None:
            return False
        num_live, num_held = len(self._live), self._num_held()
        # The core's thread counts the KV of a finished prefill, possibly after its response was
        # sent. Require two idle checks in a row.
        was_idle, self._was_idle = self._was_idle, not num_live and not num_held
        if self._was_idle:
            return was_idle
        if not self._is_logged:
            self._is_logged = True
            logger.info(
                "draining: %d requests are running, and peers have yet to fetch the KV of %d; "
                "waiting for at most %g s",
                num_live,
                num_held,
                self._timeout_s,
            )
        if not self._signals.is_forced and now - requested_at < self._timeout_s:
            return False
        logger.warning(
            "draining is incomplete: %d requests fail, the KV of %d is released", num_live, num_held
        )
        self._live.fail_all()
        return True
