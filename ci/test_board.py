#!/usr/bin/env python3
"""Runs every query of the Grafana dashboard and of the alerts in a real Prometheus.

Prometheus scrapes two prefill instances and a decode instance behind a proxy while streams run.
Then the prefill instances are killed one by one, so that the proxy retries on the other one and
finally the decode instance computes prompts itself. Exits 0 only if every query of the dashboard
returns data and every alert's query is valid, 77 if there is no Prometheus.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import httpx  # noqa: E402  # the path is set above
import yaml  # noqa: E402
from support.pd_processes import Served, serving  # noqa: E402
from support.ports import free_range  # noqa: E402
from support.programs import TINY_LLAMA, running  # noqa: E402

MONITORING = ROOT / "deploy" / "monitoring"
WINDOW = "30s"
TIMEOUT_S = 30.0
# How long streams run with all instances, with one prefill instance, and with none.
PHASES_S = (8.0, 5.0, 5.0)


def main() -> int:
    """Run every query; returns the exit status."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        print("skipped: no prometheus on PATH (Debian's package has that name)")
        return 77
    with ExitStack() as stack:
        first, second, decode = (
            stack.enter_context(serving(TINY_LLAMA, role, "--kv-pool", "dram=16MiB,chunk=16"))
            for role in ("prefill", "prefill", "decode")
        )
        argv = ["--port", "0", "--slo-ttft", "1000", "--slo-tbt", "50", "--decode", decode.url]
        argv += ["--prefill", first.url, "--prefill", second.url]
        argv += ["--health-interval", "2"]
        url = stack.enter_context(running("mooncake_proxy", *argv)).wait_for("listens on")
        url = url.split()[-1]
        board = stack.enter_context(scraping(prometheus, url))
        load(url, (None, first, second))
        empty = [name for name, query in queries().items() if not ask(board, query)]
        for name, query in alerts().items():
            ask(board, query)
            print(f"ok      alert {name}: valid query")
    for name in queries():
        print(f"{'EMPTY ' if name in empty else 'ok    '}  {name}")
    print(f"board: {len(queries())} queries, {len(empty)} without data")
    return int(bool(empty))


@contextmanager
def scraping(prometheus: str, proxy: str) -> Iterator[str]:
    """A Prometheus that scrapes a proxy and the instances that it lists every second; yields its
    URL."""
    with tempfile.TemporaryDirectory() as directory:
        folder, address = Path(directory), f"127.0.0.1:{free_range(1).first}"
        settings = (MONITORING / "prometheus-here.yaml").read_text()
        settings = settings.replace("127.0.0.1:8000", proxy.removeprefix("http://"))
        settings = settings.replace("scrape_interval: 5s", "scrape_interval: 1s")
        (folder / "prometheus.yml").write_text(settings)
        shutil.copy(MONITORING / "alert-rules.yaml", folder)
        command = [prometheus, f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(f"http://{address}", process)
            yield f"http://{address}"
        finally:
            process.terminate()
            process.wait(TIMEOUT_S)


def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until Prometheus is ready; raises SystemExit if it exits or takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/-/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("prometheus did not become ready")


def load(url: str, killed: tuple[Served | None, ...]) -> None:
    """Run streams while instances are killed."""
    body = {"model": "tiny-llama", "max_tokens": 30, "temperature": 0, "stream": True}
    number = 0
    for instance, seconds in zip(killed, PHASES_S, strict=True):
        if instance is not None:
            instance.kill()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            number += 1
            prompt = f"Request {number}: a language model answers in two"
            httpx.post(f"{url}/v1/completions", json={**body, "prompt": prompt}, timeout=TIMEOUT_S)


def queries() -> Mapping[str, str]:
    """The dashboard's queries, by panel."""
    board = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }


def alerts() -> Mapping[str, str]:
    """The queries of the alert rules, by name."""
    groups = yaml.safe_load((MONITORING / "alert-rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def ask(board: str, query: str) -> list[Any]:
    """Run a query; returns the series."""
    wanted = query.replace("$__rate_interval", WINDOW)
    answer = httpx.get(f"{board}/api/v1/query", params={"query": wanted}, timeout=TIMEOUT_S)
    answer.raise_for_status()
    found: list[Any] = answer.json()["data"]["result"]
    return found


if __name__ == "__main__":
    sys.exit(main())
