"""``mooncake-hal bench transfer``: how fast KV moves between two processes of this host."""

from mooncake_hal.bench.transfer_command import add_arguments, run

__all__ = ["add_arguments", "run"]
