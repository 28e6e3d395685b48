"""Parsing a command line and printing its help imports no heavy module."""

from __future__ import annotations

import pytest
from support.programs import imported_by

HEAVY = {"torch", "numpy", "transformers", "zmq", "uvicorn"}
ONLY_IN_USE = {"jinja2", "importlib.metadata", "mooncake_engine.replay"}


@pytest.mark.parametrize("command", ["serve", "up", "bench", "generate"])
def test_help_imports_no_heavy_modules(command: str) -> None:
    modules = imported_by("-m", "mooncake_engine.cli", command, "--help")
    found = {name.partition(".")[0] for name in modules}
    assert "mooncake_engine" in found
    assert found.isdisjoint(HEAVY), found & HEAVY


@pytest.mark.parametrize("argv", [("--help",), ("serve", "--help"), ("up", "--help")])
def test_a_command_imports_no_modules_of_other_commands(argv: tuple[str, ...]) -> None:
    modules = imported_by("-m", "mooncake_engine.cli", *argv)
    assert "mooncake_engine.instance_arguments" in modules
    assert modules.isdisjoint(ONLY_IN_USE), modules & ONLY_IN_USE


@pytest.mark.parametrize("module", ["api_server", "api_workers", "api_worker"])
def test_server_modules_do_not_import_torch(module: str) -> None:
    """If torch were imported, transformers would import all of its models before the tokenizer
    is used for the first time."""
    modules = imported_by("-c", f"import mooncake_engine.server.{module}")
    assert "mooncake_engine.kv_connector" in modules
    assert "torch" not in modules


def test_core_process_imports_torch_only_in_its_main() -> None:
    """There the garbage collector is paused for it."""
    modules = imported_by("-c", "import mooncake_engine.core_process")
    assert "mooncake_engine.core_messages" in modules
    assert "torch" not in modules
