"""Starts the proxies that `bench_proxy.py` measures, in front of one fast fake P and D.

Each place of a measurement has its own contenders and backends. On `one core`, every proxy is bound
to the same core, and backends and load generator to the others, so that all proxies have the same
CPU. On the `whole machine`, nothing is bound.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
SOURCE = ROOT / "tests" / "benchmarks" / "proxy" / "bench.c"
ROUTER_VERSION = "0.3.2"
NUM_TOKENS = 200
TICK_US = 1000
DIRECT = "none"
OURS = "mooncake-proxy"
OURS_TWICE = "mooncake-proxy, 2"
ROUTER = "sglang-router"
NGINX = "nginx (plain)"
EARLIER = "the other checkout"


@dataclass(frozen=True)
class Contender:
    """A running proxy. The process tree of `pid` is measured; None: no proxy."""

    name: str
    port: int
    pid: int | None


@dataclass(frozen=True)
class Place:
    """Contenders that are compared, and the load generator's cores (None: any)."""

    name: str
    contenders: dict[str, Contender]
    load_cores: frozenset[int] | None


@dataclass(frozen=True)
class Starter:
    """Starts processes on some cores; `stack` stops them."""

    stack: ExitStack
    cores: frozenset[int] | None

    def __call__(self, command: list[str], environment: dict[str, str] | None = None) -> int:
        """Start a process; returns its pid."""
        return self.stack.enter_context(process(command, environment, self.cores)).pid


def build() -> Path:
    """Compile the load generator and backend; returns the program."""
    CACHE.mkdir(exist_ok=True)
    binary = CACHE / "proxy_bench"
    if not binary.exists() or binary.stat().st_mtime < SOURCE.stat().st_mtime:
        subprocess.run(["cc", "-O2", "-o", str(binary), str(SOURCE)], check=True)
    return binary


def one_core(stack: ExitStack, bench: Path) -> Place:
    """Start every proxy on the first core, everything else on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    rest = frozenset(others or [first])
    prefill, decode = start_backend(Starter(stack, rest), bench)
    start = Starter(stack, frozenset([first]))
    found = [start_ours(start, prefill, decode, 1), start_router(start, prefill, decode)]
    return place("one core", found, rest)


def two_checkouts(stack: ExitStack, bench: Path, checkout: Path) -> Place:
    """Start our proxy and another checkout's on the first core, everything else on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    rest = frozenset(others or [first])
    prefill, decode = start_backend(Starter(stack, rest), bench)
    start = Starter(stack, frozenset([first]))
    earlier = start_ours(start, prefill, decode, 1, checkout)
    found = [start_ours(start, prefill, decode, 1), replace(earlier, name=EARLIER)]
    return place("one core", found, rest)


def whole_machine(stack: ExitStack, bench: Path) -> Place:
    """Start everything without binding it to cores."""
    start = Starter(stack, None)
    prefill, decode = start_backend(start, bench)
    found = [
        Contender(DIRECT, decode, None),
        start_ours(start, prefill, decode, 1),
        start_ours(start, prefill, decode, 2),
        start_router(start, prefill, decode),
    ]
    if shutil.which("nginx"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found.append(start_nginx(start, folder, decode))
    else:
        print("nginx: skipped, not on PATH")
    return place("whole machine", found, None)


def place(name: str, found: list[Contender], load_cores: frozenset[int] | None) -> Place:
    """Wait until all contenders answer; returns the place."""
    for contender in found:
        wait_until_it_answers(contender)
    return Place(name, {contender.name: contender for contender in found}, load_cores)


# ---------------------------------------------------------------- processes


def start_backend(start: Starter, bench: Path) -> tuple[int, int]:
    """Start P and D in one process; returns their ports."""
    prefill, decode = free_port(), free_port()
    start([str(bench), "backend", str(prefill), str(decode), str(NUM_TOKENS), str(TICK_US)])
    return prefill, decode


def start_ours(
    start: Starter, prefill: int, decode: int, num_workers: int, checkout: Path = ROOT
) -> Contender:
    """Start mooncake-proxy with its default health checks, policies and metrics."""
    port = free_port()
    flags = ["--port", str(port), "--prefill", url(prefill), "--decode", url(decode)]
    flags += ["--workers", str(num_workers), "--log-level", "error"]
    environment = os.environ | {"PYTHONPATH": python_path(checkout)}
    pid = start([sys.executable, "-m", "mooncake_proxy", *flags], environment)
    return Contender(OURS if num_workers == 1 else OURS_TWICE, port, pid)


def python_path(checkout: Path) -> str:
    """PYTHONPATH for the packages that a checkout's proxy imports."""
    return os.pathsep.join(str(checkout / name) for name in ("proxy", "api", "conductor"))


def start_router(start: Starter, prefill: int, decode: int) -> Contender:
    """Start sglang-router in PD mode, with one thread per available core."""
    port = free_port()
    executable = router_python().parent / "sglang-router"
    pools = ["--prefill", url(prefill), str(free_port()), "--decode", url(decode)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [str(executable), "launch", "--pd-disaggregation", *pools, *where]
    return Contender(
        ROUTER, port, start([*command, "--policy", "round_robin", "--log-level", "error"])
    )


def router_python() -> Path:
    """An interpreter with sglang-router, which is installed the first time."""
    home = CACHE / "venv-router"
    python = home / "bin" / "python"
    if not (home / "bin" / "sglang-router").exists():
        venv.create(home, with_pip=True, clear=True)
        package = f"sglang-router=={ROUTER_VERSION}"
        subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    return python


def start_nginx(start: Starter, folder: Path, decode: int) -> Contender:
    """Start nginx as a plain reverse proxy: it sends one request where the others send two."""
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(
        f"worker_processes 2; daemon off; pid {folder}/pid; error_log stderr crit;\n"
        "events { worker_connections 1024; }\n"
        f"http {{ access_log off; keepalive_requests 1000000000; client_body_temp_path {folder};\n"
        f"proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;\n"
        f"scgi_temp_path {folder}/s; upstream d {{ server 127.0.0.1:{decode}; keepalive 256;\n"
        "keepalive_requests 1000000000; }\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://d;\n"
        'proxy_buffering off; proxy_http_version 1.1; proxy_set_header Connection ""; } } }\n'
    )
    return Contender(NGINX, port, start(["nginx", "-c", str(config), "-e", "stderr"]))


@contextmanager
def process(
    command: list[str],
    environment: dict[str, str] | None = None,
    cores: frozenset[int] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A child process on these cores, stopped when the block ends."""
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(
        command, stdout=quiet, stderr=quiet, env=environment, preexec_fn=bind_to(cores)
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def bind_to(cores: frozenset[int] | None) -> partial[None] | None:
    """A function for the child, to call before exec, that binds it to these cores."""
    return None if cores is None else partial(os.sched_setaffinity, 0, cores)


def free_port() -> int:
    """A TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def url(port: int) -> str:
    """Loopback."""
    return f"http://127.0.0.1:{port}"


def wait_until_it_answers(contender: Contender) -> None:
    """Wait until a real request succeeds."""
    body = b'{"model":"m","prompt":"hi","max_tokens":4}'
    request = urllib.request.Request(
        f"{url(contender.port)}/v1/completions", body, {"content-type": "application/json"}
    )
    for _ in range(150):
        try:
            with urllib.request.urlopen(request, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{contender.name} does not answer on port {contender.port}")
