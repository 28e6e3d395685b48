"""Real processes for benchmarks and tests: instances and proxies on free ports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mooncake_engine.process.child_processes import die_with_parent


@contextmanager
def running(module: str, *arguments: str, log: Path) -> Iterator[str]:
    """Run ``python -m module arguments``; yields the URL once the program has printed it.

    Args:
        module: ``mooncake_engine`` or ``mooncake_proxy``.
        arguments: of its command line.
        log: gets its output.
    """
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            preexec_fn=die_with_parent(),
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "http://" in line:
                yield "http://" + line.split("http://", 1)[1].split()[0]
                return
        raise AssertionError(f"{module} did not start:\n{log.read_text()[-2000:]}")
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@contextmanager
def serving(model: Path, scratch: Path, role: str, *arguments: str) -> Iterator[str]:
    """One instance on a free port; yields its URL."""
    command = ["serve", "--model", str(model), "--role", role, "--port", "0", *arguments]
    with running("mooncake_engine", *command, log=scratch / f"{role}.log") as url:
        yield url


@contextmanager
def deployment(
    model: Path, scratch: Path, arguments: Sequence[str] = (), proxy_arguments: Sequence[str] = ()
) -> Iterator[str]:
    """A prefill instance, a decode instance and a proxy; yields the proxy's URL."""
    with ExitStack() as stack:
        prefill = stack.enter_context(serving(model, scratch, "prefill", *arguments))
        decode = stack.enter_context(serving(model, scratch, "decode", *arguments))
        pools = ["--port", "0", "--prefill", prefill, "--decode", decode]
        log = scratch / "proxy.log"
        yield stack.enter_context(running("mooncake_proxy", *pools, *proxy_arguments, log=log))
