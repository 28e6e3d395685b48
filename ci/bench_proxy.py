"""Proxies side by side in one run, in front of the same fake backends.

    python ci/bench_proxy.py [--seconds 3] [--rounds 3] [--json FILE]

Ours, sglang-router and nginx. Needs a C compiler (load generator and backends are
tests/benchmarks/proxy/bench.c), nginx on PATH, and a package index the first time: sglang-router
goes into a venv of its own under .cache/. Prints a table, then one line per speed item: name,
figure, wanted, ok or short. Exit 0 only if all hold.
"""

from __future__ import annotations

import argparse
import json
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
SOURCE = ROOT / "tests" / "benchmarks" / "proxy" / "bench.c"
ROUTER_VERSION = "0.3.2"
NUM_TOKENS = 200
TICK_US = 1000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Contender:
    """A proxy that runs. `pid` is the process whose tree is measured; None: no proxy."""

    name: str
    port: int
    pid: int | None


@dataclass(frozen=True)
class Figures:
    """One measurement."""

    requests_per_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us_per_request: float
    cpu_us_per_token: float
    errors: int


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3, help="medians over so many")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--skip-memory", action="store_true", help="not the 100,000 requests")
    args = parser.parse_args()
    bench = build()
    with ExitStack() as stack:
        contenders = start_all(stack, bench)
        table = measure_all(bench, contenders, args)
        growth = None if args.skip_memory else memory_growth(bench, contenders["mooncake-proxy"])
    print_table(table)
    if args.json:
        args.json.write_text(json.dumps({"table": table, "memory_growth_kib": growth}, indent=1))
    return judge(table, growth, start_seconds())


# ---------------------------------------------------------------- what runs


def build() -> Path:
    """The compiled load generator."""
    CACHE.mkdir(exist_ok=True)
    binary = CACHE / "proxy_bench"
    if not binary.exists() or binary.stat().st_mtime < SOURCE.stat().st_mtime:
        subprocess.run(["cc", "-O2", "-o", str(binary), str(SOURCE)], check=True)
    return binary


def router_python() -> Path:
    """An interpreter with sglang-router, made the first time."""
    home = CACHE / "venv-router"
    python = home / "bin" / "python"
    if not (home / "bin" / "sglang-router").exists():
        venv.create(home, with_pip=True, clear=True)
        package = f"sglang-router=={ROUTER_VERSION}"
        subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    return python


def start_all(stack: ExitStack, bench: Path) -> dict[str, Contender]:
    """Backends and every proxy in front of them."""
    prefill, decode = free_port(), free_port()
    for port in (prefill, decode):
        command = [str(bench), "backend", str(port), str(NUM_TOKENS), str(TICK_US)]
        stack.enter_context(process(command))
    found = [Contender("none", decode, None)]
    found.append(start_ours(stack, prefill, decode))
    found.append(start_router(stack, prefill, decode))
    if shutil.which("nginx"):
        found.append(start_nginx(stack, decode))
    else:
        print("nginx: skipped, it is not on PATH")
    for contender in found:
        wait_until_it_answers(contender)
    return {contender.name: contender for contender in found}


def start_ours(stack: ExitStack, prefill: int, decode: int) -> Contender:
    """mooncake-proxy, one worker, with health checks, policies and metrics as by default."""
    port = free_port()
    flags = ["--port", str(port), "--prefill", url(prefill), "--decode", url(decode)]
    command = [sys.executable, "-m", "mooncake_proxy", "--log-level", "error", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "proxy")}
    started = stack.enter_context(process(command, environment))
    return Contender("mooncake-proxy", port, started.pid)


def start_router(stack: ExitStack, prefill: int, decode: int) -> Contender:
    """sglang-router in PD mode."""
    port = free_port()
    executable = router_python().parent / "sglang-router"
    pools = ["--prefill", url(prefill), str(free_port()), "--decode", url(decode)]
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [str(executable), "launch", "--pd-disaggregation", *pools, *where]
    command += ["--policy", "round_robin", "--log-level", "error"]
    started = stack.enter_context(process(command))
    return Contender("sglang-router", port, started.pid)


def start_nginx(stack: ExitStack, decode: int) -> Contender:
    """nginx as a plain reverse proxy: it sends one request where the others send two."""
    port = free_port()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
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
    command = ["nginx", "-c", str(config), "-e", "stderr"]
    started = stack.enter_context(process(command))
    return Contender("nginx (plain)", port, started.pid)


@contextmanager
def process(
    command: list[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that ends with the block."""
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
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


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def url(port: int) -> str:
    """Loopback."""
    return f"http://127.0.0.1:{port}"


def wait_until_it_answers(contender: Contender) -> None:
    """A real request has to succeed."""
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


# ---------------------------------------------------------------- measuring


def measure_all(
    bench: Path, contenders: dict[str, Contender], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Medians per proxy. Rounds are interleaved, so that a noisy minute hits everybody."""
    cases = [(1, 0), (16, 0), (64, 0), (64, 1)]
    samples: dict[tuple[str, int, int], list[Figures]] = {}
    for _ in range(args.rounds):
        for connections, streams in cases:
            for contender in contenders.values():
                figures = measure(bench, contender, connections, args.seconds, streams)
                samples.setdefault((contender.name, connections, streams), []).append(figures)
    table = {}
    for name in contenders:
        one, few, many, streaming = (samples[(name, *case)] for case in cases)
        table[name] = {
            "requests_per_s_1": mid(one, "requests_per_s"),
            "requests_per_s_16": mid(few, "requests_per_s"),
            "requests_per_s_64": mid(many, "requests_per_s"),
            "p50_ms_1": mid(one, "p50_ms"),
            "cpu_us_per_request_16": mid(few, "cpu_us_per_request"),
            "tokens_per_s": mid(streaming, "tokens_per_s"),
            "chunk_p99_ms": mid(streaming, "p99_ms"),
            "cpu_us_per_token": mid(streaming, "cpu_us_per_token"),
            "errors": sum(figures.errors for row in (one, few, many, streaming) for figures in row),
            "peak_rss_mib": peak_rss_kib(contenders[name].pid) / 1024,
        }
    return table


def mid(rows: list[Figures], field: str) -> float:
    """The median of one field."""
    return float(median(getattr(row, field) for row in rows))


def measure(
    bench: Path, contender: Contender, connections: int, seconds: float, streams: int
) -> Figures:
    """One closed-loop run."""
    before = cpu_seconds(contender.pid)
    command = [bench, "load", contender.port, connections, seconds, streams]
    output = subprocess.run([str(word) for word in command], check=True, capture_output=True).stdout
    used_us = (cpu_seconds(contender.pid) - before) * 1e6
    got = json.loads(output)
    return Figures(
        got["requests_per_s"],
        got["tokens_per_s"],
        got["p50_ms"],
        got["p99_ms"],
        used_us / max(1, got["requests"]),
        used_us / max(1, got["tokens"]),
        got["errors"],
    )


def tree(pid: int | None) -> list[int]:
    """The process and its children."""
    if pid is None:
        return []
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in tree(int(child)))]


def cpu_seconds(pid: int | None) -> float:
    """User and system time of the tree so far."""
    total = 0
    for member in tree(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def rss_kib(pid: int | None, field: str) -> int:
    """Resident memory of the tree."""
    total = 0
    for member in tree(pid):
        for line in Path(f"/proc/{member}/status").read_text().splitlines():
            if line.startswith(field):
                total += int(line.split()[1])
    return total


def peak_rss_kib(pid: int | None) -> int:
    """The most it ever had."""
    return rss_kib(pid, "VmHWM")


def memory_growth(bench: Path, ours: Contender) -> int:
    """KiB that 100,000 more requests add to a proxy that is warm."""
    before = rss_kib(ours.pid, "VmRSS")
    done = 0
    while done < 100_000:
        command = [str(bench), "load", str(ours.port), "16", "2", "0"]
        done += json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[
            "requests"
        ]
    return rss_kib(ours.pid, "VmRSS") - before


def start_seconds() -> float:
    """Import and start until the proxy says that it listens; the best of three."""
    took = []
    for _ in range(3):
        began = time.monotonic()
        command = [sys.executable, "-m", "mooncake_proxy", "--port", "0", "--health-interval", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "proxy")}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert child.stdout is not None
        child.stdout.readline()
        took.append(time.monotonic() - began)
        child.terminate()
        child.wait(10)
        child.stdout.close()
    return min(took)


# ---------------------------------------------------------------- judging


def print_table(table: dict[str, dict[str, float]]) -> None:
    """All figures."""
    columns = list(next(iter(table.values())))
    print(f"{'':22}" + "".join(f"{name:>16}" for name in table))
    for column in columns:
        print(f"{column:22}" + "".join(f"{row[column]:16.2f}" for row in table.values()))


def judge(table: dict[str, dict[str, float]], growth: int | None, start: float) -> int:
    """One line per item of the issue; 0 when all hold."""
    ours, router = table["mooncake-proxy"], table["sglang-router"]
    added = ours["p50_ms_1"] - table["none"]["p50_ms_1"]
    items = [
        at_least("proxy_requests_16", ours["requests_per_s_16"], 1.3 * router["requests_per_s_16"]),
        at_least("proxy_requests_64", ours["requests_per_s_64"], 1.3 * router["requests_per_s_64"]),
        at_most("proxy_cpu_us_per_token", ours["cpu_us_per_token"], router["cpu_us_per_token"]),
        at_most("proxy_chunk_p99_ms", ours["chunk_p99_ms"], router["chunk_p99_ms"]),
        at_most("proxy_added_p50_ms", added, 0.3),
        at_most("proxy_errors", ours["errors"], 0),
        at_most("proxy_start_s", start, 1.0),
    ]
    if growth is not None:
        items.append(at_most("proxy_growth_kib_100k_requests", growth, 1024))
    return 0 if all(items) else 1


def at_least(name: str, figure: float, wanted: float) -> bool:
    """Print and tell whether it holds."""
    return _item(name, figure, f">= {wanted:.3f}", figure >= wanted)


def at_most(name: str, figure: float, wanted: float) -> bool:
    """Print and tell whether it holds."""
    return _item(name, figure, f"<= {wanted:.3f}", figure <= wanted)


def _item(name: str, figure: float, wanted: str, holds: bool) -> bool:
    print(f"{name:34} {figure:12.3f}   {wanted:18} {'ok' if holds else 'short'}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
