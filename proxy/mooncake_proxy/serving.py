"""Runs the proxy from a finished configuration to a clean stop, in one process or several workers.

`cli.py` imports this module only after the options have been checked.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from contextlib import suppress

import uvloop

from mooncake_proxy.api.application import ProxyApplication
from mooncake_proxy.config import ProxyConfig
from mooncake_proxy.ops.background_stderr import background_stderr
from mooncake_proxy.ops.proxy_process import ShutdownSignals
from mooncake_proxy.ops.worker_link import WorkerLink
from mooncake_proxy.ops.worker_processes import WorkerSupervisor

logger = logging.getLogger(__name__)


def run(config: ProxyConfig) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns:
        The exit status of the program.

    Raises:
        ConfigError: the address is taken, or a file that the configuration names can't be used.
            With several workers it is not raised: the worker logs it, and its exit status is
            returned.
    """
    _raise_descriptor_limit()
    with background_stderr():
        if config.workers > 1:
            return WorkerSupervisor(config, _run_worker).run()
        uvloop.run(serve(config))
    return 0


async def serve(config: ProxyConfig, link: WorkerLink | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal ends the draining.

    Args:
        config: the checked configuration.
        link: connects this process with the proxy's other workers; None: a single process.
    """
    app = ProxyApplication(config, link)
    stop = ShutdownSignals()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: stop.signal(loop.time()))
    loop.add_signal_handler(signal.SIGHUP, app.process.reload)
    await app.start()
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls.certificate else "http"
    # Objects created so far live as long as the process, so the garbage collector need not traverse
    # them. A few hundred are garbage already: not worth the 10 ms that a collection takes here.
    gc.freeze()
    _announce(f"mooncake-proxy listens on {scheme}://{host}:{app.port}")
    requested = loop.create_task(stop.requested.wait())
    try:
        while not stop.requested.is_set():
            app.poll()
            await asyncio.wait({requested}, timeout=1.0)
    finally:
        requested.cancel()
        await app.close(stop)


def _announce(line: str) -> None:
    """Print the address. The proxy also serves if stdout can't be written, as on a full disk."""
    try:
        sys.stdout.write(f"{line}\n")  # one write: workers share the output
        sys.stdout.flush()
    except OSError as exc:
        logger.warning("can't write to standard output: %s", exc)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one: a request needs at least two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # the kernel may allow fewer than the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _run_worker(config: ProxyConfig, link: WorkerLink) -> None:
    uvloop.run(serve(config, link))
