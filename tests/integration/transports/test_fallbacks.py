"""On a host without a compiler the same bytes arrive, and the log names the fallback and the
reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
from mooncake_hal.testing.transports import TransportKit, random_pieces
import numpy as np

kit = TransportKit()
kit.loader = "mooncake_hal.transports.{name}.{name}_transport:load"
kit.setup_method()
pair = kit.pair(1 << 20)
kit.check_moves(pair, random_pieces(kit.rng, np.full(500, 1000, np.int64), 1 << 20))
kit.teardown_method()
print("moved")
"""


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("shm", "'shm_copy' is unavailable, using process_vm_readv through ctypes"),
        ("tcp", "'tcp_stream' is unavailable, using sockets of the interpreter"),
    ],
)
def test_without_a_compiler(name: str, warning: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("CC", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{name}", name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["moved"], done.stderr
    assert done.stdout.count(warning) == 1
    assert "no c compiler on PATH" in done.stdout


def test_plugin_discovery_imports_nothing_heavy() -> None:
    """Discovery must not import numpy, torch or a transport."""
    names = ("shm", "tcp")
    imports = "; ".join(f"import mooncake_hal.transports.{name}.{name}_plugin" for name in names)
    program = (
        f"import sys; {imports}; print(sorted({{'numpy', 'torch', 'msgspec'}} & {{*sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
