"""All that the chip's owner writes to have every op, the memory and the runtime tested."""

from __future__ import annotations

from mooncake_hal.testing.backends import BackendBasics
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rows import RowsSuite


class TestMyChip(BackendBasics, OpsSuite, RowsSuite):
    """``BackendConformance`` has the collectives too; this chip has none yet."""

    backend_name = "mychip"
