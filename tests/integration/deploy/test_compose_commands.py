"""The compose file's command lines, run here as processes: P, D and proxy serve a request."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from support.deploy import compose_commands
from support.programs import TINY_LLAMA, running

PROGRAMS = {
    "mooncake-engine": "mooncake_engine.cli",
    "mooncake-kv": "mooncake_kv",
    "mooncake-proxy": "mooncake_proxy",
}


def adapted(service: str, replaced: dict[str, str], file: str = "compose.yaml") -> list[str]:
    """A service's command line, with these flags adapted to this host."""
    program, *arguments = compose_commands(file)[service]
    words = []
    for argument in arguments:
        flag = argument.split("=")[0]
        words.append(f"{flag}={replaced[flag]}" if flag in replaced else argument)
    assert set(replaced) <= {word.split("=")[0] for word in words}, "compose has no such flag"
    return [PROGRAMS[program], *words]


def test_compose_services_serve_a_request(tmp_path: Path) -> None:
    secret = tmp_path / "kv-secret"
    secret.write_text("a secret of this deployment")
    here = {
        "--model": str(TINY_LLAMA),
        "--host": "127.0.0.1",
        "--port": "0",
        "--kv-host": "127.0.0.1",
        "--kv-port": "0",
        "--kv-secret-file": str(secret),
        "--threads": "1",
    }
    with (
        running(*adapted("prefill-0", here)) as prefill,
        running(*adapted("decode-0", here)) as decode,
    ):
        urls = {
            "--prefill": prefill.wait_for("ready ").split()[1],
            "--decode": decode.wait_for("ready ").split()[1],
        }
        listening = {"--host": "127.0.0.1", "--port": "0", **urls}
        with running(*adapted("proxy", listening)) as proxy:
            url = proxy.wait_for("listens on ").split()[-1]
            answer = complete(url)
    assert answer["choices"][0]["text"].startswith(" very different")
    assert answer["model"] == "model"


def test_compose_instance_uses_the_store(tmp_path: Path) -> None:
    secret = tmp_path / "kv-secret"
    secret.write_text("a secret of this deployment")
    here = {"--kv-host": "127.0.0.1", "--port": "0", "--kv-secret-file": str(secret)}
    of_store = here | {"--dram": "16MiB", "--metrics-port": "0"}
    with running(*adapted("store", of_store, "compose.store.yaml")) as store:
        port = store.wait_for("listens on ").split("://")[1].split()[0].rpartition(":")[2]
        of_instance = here | {
            "--model": str(TINY_LLAMA),
            "--host": "127.0.0.1",
            "--kv-port": "0",
            "--threads": "1",
            "--kv-pool": f"connect=localhost:{port}",
        }
        with running(*adapted("prefill-0", of_instance, "compose.store.yaml")) as instance:
            url = instance.wait_for("ready ").split()[1]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"{url}/metrics", timeout=10) as response:
                metrics = response.read().decode()
    [connected] = [
        line for line in metrics.splitlines() if line.startswith("mooncake:kv_pool_num_connected")
    ]
    assert float(connected.split()[-1]) == 1


def complete(url: str) -> dict[str, Any]:
    """One completion from the deployment."""
    body = {
        "model": "model",
        "prompt": "A language model answers in two",
        "max_tokens": 24,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=50) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer
