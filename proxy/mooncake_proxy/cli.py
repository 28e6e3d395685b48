"""Entry point of `mooncake-proxy`: parses flags, runs the proxy, maps errors to exit statuses."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from mooncake_proxy.config_from_options import (
    check_can_serve,
    config_from,
    warn_if_early_pulls_are_off,
    warn_if_open,
)
from mooncake_proxy.errors import AddressInUse, ConfigError
from mooncake_proxy.ops.background_stderr import begin_log
from mooncake_proxy.proxy_options import build_parser

# Container objects allocated before the garbage collector looks for cycles. Importing modules and
# serving requests create few cycles; with Python's default of 700, startup and every burst of
# requests would trigger collections again and again.
GC_THRESHOLD = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proxy.

    Returns:
        0 after a clean stop, 1 if the port is taken, 2 if the configuration can't be used.
    """
    gc.set_threshold(GC_THRESHOLD)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # during startup there is nothing to drain
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nor to reload
    args = build_parser().parse_args(argv)
    begin_log(args.log_level, args.log_format)
    try:
        config = config_from(args)
        check_can_serve(config)
        warn_if_open(config)
        warn_if_early_pulls_are_off(config)
        from mooncake_proxy.serving import run  # slow to import; --help and errors don't need it

        return run(config)
    except ConfigError as exc:
        with suppress(OSError):
            print(f"mooncake-proxy: {exc}", file=sys.stderr)
        # Service managers restart the program after status 1, but not after 2.
        return 1 if isinstance(exc, AddressInUse) else 2
