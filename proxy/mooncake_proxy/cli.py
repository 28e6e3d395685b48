"""`mooncake-proxy`: flags to configuration, signals to a clean stop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import uvloop

from mooncake_proxy.api.application import ProxyApplication
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.errors import AddressTaken, ConfigError
from mooncake_proxy.ops.background_stderr import background_stderr, begin_log
from mooncake_proxy.ops.proxy_process import ShutdownSignals
from mooncake_proxy.ops.worker_link import WorkerLink
from mooncake_proxy.ops.worker_processes import WorkerSupervisor
from mooncake_proxy.proxy_options import build_parser, check_can_serve, config_from

log = logging.getLogger(__name__)
# Of new objects that could be parts of cycles, before they are looked through.
GC_THRESHOLD = 10_000


async def serve(config: ProxyConfig, link: WorkerLink | None = None) -> None:
    """Run until SIGINT or SIGTERM, then drain, which a second one ends.

    `share` where this is one of several workers.
    """
    app = ProxyApplication(config, link)
    stop = ShutdownSignals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stop.signal(loop.time()))
    try:
        await app.start()
    except OSError as exc:
        kind = AddressTaken if exc.errno == errno.EADDRINUSE else ConfigError
        raise kind(f"can't listen on {config.host}:{config.port}: {exc}") from exc
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls.certificate else "http"
    # Objects loaded so far live as long as the process: keep the garbage collector off them.
    gc.collect()
    gc.freeze()
    # Requests leave hardly any cycles. With Python's own 700, a burst of them is looked through
    # again and again while all of it is in use.
    gc.set_threshold(GC_THRESHOLD)
    _announce(f"mooncake-proxy listens on {scheme}://{host}:{app.port}")
    asked = loop.create_task(stop.asked.wait())
    try:
        while not stop.asked.is_set():
            app.poll()
            await asyncio.wait({asked}, timeout=1.0)
    finally:
        asked.cancel()
        await app.close(stop)


def _announce(line: str) -> None:
    """Print the address. A full disk under standard output is no reason not to serve."""
    try:
        print(f"{line}\n", end="", flush=True)  # one write: workers share the output
    except OSError as exc:
        log.warning("can't write to standard output: %s", exc)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # it is flushed again at the end


def _raise_descriptor_limit() -> None:
    """Take all descriptors that this process may have: a connection to each side per request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # where the kernel allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run_worker(config: ProxyConfig, link: WorkerLink) -> None:
    with background_stderr():  # of its own: threads end where a process forks
        uvloop.run(serve(config, link))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 2 for a configuration that can't be used, 1 for a port that is taken."""
    args = build_parser().parse_args(argv)
    begin_log(args.log_level, args.log_format)
    try:
        config = config_from(args)
        check_can_serve(config)
        _raise_descriptor_limit()
        with background_stderr():
            if config.workers > 1:
                return WorkerSupervisor(config, _run_worker).run()
            uvloop.run(serve(config))
    except ConfigError as exc:
        with suppress(OSError):
            print(f"mooncake-proxy: {exc}", file=sys.stderr)
        # A service manager tries again after 1, not after 2.
        return 1 if isinstance(exc, AddressTaken) else 2
    return 0
