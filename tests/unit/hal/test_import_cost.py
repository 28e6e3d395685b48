"""Importing the hardware layer and discovering its plugins imports no heavy module."""

from __future__ import annotations

import subprocess
import sys

from support.programs import imported_by

HEAVY = ("torch", "numpy", "zmq", "msgspec", "importlib.metadata", "mooncake_hal.bench")


def test_package_imports_no_heavy_modules() -> None:
    found = imported_by("-c", "import mooncake_hal")
    assert "mooncake_hal.registry" in found
    assert found.isdisjoint(HEAVY)


def test_discovery_and_probes_import_no_torch() -> None:
    # not -X importtime: it does not show what importlib.import_module loads
    statement = (
        "import sys; from mooncake_hal import Registry; "
        "Registry.discover().backend_table(); print(*sys.modules)"
    )
    command = [sys.executable, "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    found = set(done.stdout.split())
    assert {f"mooncake_hal_{name}.{name}_plugin" for name in ("cpu", "cuda", "ascend")} <= found
    assert "torch" not in found


def test_public_names_have_docstrings() -> None:
    import mooncake_hal

    for name in mooncake_hal.__all__:
        assert name == "API_VERSION" or getattr(mooncake_hal, name).__doc__
