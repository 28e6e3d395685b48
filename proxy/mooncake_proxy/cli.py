"""`mooncake-proxy`: flags to configuration, errors to exit statuses."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from mooncake_proxy.errors import AddressTaken, ConfigError
from mooncake_proxy.ops.background_stderr import begin_log
from mooncake_proxy.proxy_options import build_parser, check_can_serve, config_from

# Of new objects that could be parts of cycles, before they are looked through. Neither modules nor
# requests leave many: with Python's own 700, all that a start loads and a burst of requests uses
# is looked through again and again.
GC_THRESHOLD = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. 2 for a configuration that can't be used, 1 for a port that is taken."""
    gc.set_threshold(GC_THRESHOLD)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it loads there is nothing to drain
    args = build_parser().parse_args(argv)
    begin_log(args.log_level, args.log_format)
    try:
        config = config_from(args)
        check_can_serve(config)
        from mooncake_proxy.serving import run  # most of the proxy: help and refusals need none

        return run(config)
    except ConfigError as exc:
        with suppress(OSError):
            print(f"mooncake-proxy: {exc}", file=sys.stderr)
        # A service manager tries again after 1, not after 2.
        return 1 if isinstance(exc, AddressTaken) else 2
