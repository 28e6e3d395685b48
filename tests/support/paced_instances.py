"""Instances on a simulated device (backend ``paced``) that takes as long as a large GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.programs import READY_S, TINY_LLAMA, Program

STEP_MS = {1: 5.0, 32: 6.7, 128: 10.9, 256: 16.0}
"""Milliseconds of a decode step by concurrent streams: an 8 B model's on one H200."""
SECONDS = 6.0
"""Seconds of decoding per case."""


@contextmanager
def paced_instance(
    step_ms: float, *more: str, model: Path = TINY_LLAMA
) -> Iterator[tuple[int, Program]]:
    """An instance on the paced device: its port and its process."""
    num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    layer_us = step_ms * 1e3 / num_layers
    argv = ["serve", "--model", str(model), "--port", "0", "--backend", "paced"]
    argv += ["--num-kv-blocks", "16384", "--threads", "1", "--swap-space", "0"]
    argv += ["--async-scheduling", "--core-process", *more]
    with ready(["mooncake_engine.cli", *argv], {"MOONCAKE_HAL_PACED": f"{layer_us} 1"}) as found:
        yield found


@contextmanager
def proxied(prefill: int, decode: int, *more: str) -> Iterator[int]:
    """A proxy in front of a prefill and a decode instance on these ports; yields its port."""
    pools = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    with ready(["mooncake_proxy", "--port", "0", *pools, *more], {}, "listens") as (port, _):
        yield port


@contextmanager
def ready(
    argv: list[str],
    environment: dict[str, str],
    says: str = "ready ",
    timeout_s: float = READY_S,
) -> Iterator[tuple[int, Program]]:
    """A program that listens: its port and its process."""
    program = Program(argv, environment=environment)
    try:
        yield int(program.wait_for(says, timeout_s).rsplit(":", 1)[1]), program
    finally:
        program.close()
