"""``mooncake-hal doctor`` against a live instance: it reports which port fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.running import serving

MODEL = Path(__file__).resolve().parents[3] / "examples/tiny-llama"
OPTIONS = ("--num-kv-blocks", "64", "--threads", "1")


def doctor(*arguments: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from mooncake_hal.cli import main; sys.exit(main())",
    ]
    done = subprocess.run(
        [*command, "doctor", *arguments], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(120)
def test_every_port_of_live_instance_is_checked(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("open sesame, said Ali Baba")
    with serving(MODEL, tmp_path, "prefill", *OPTIONS, "--kv-secret-file", str(secret)) as url:
        status, output = doctor("--peer", url, "--secret-file", str(secret))
        assert status == 0, output
        assert f"ok    HTTP of {url}" in output
        assert "ok    KV side channel 127.0.0.1:" in output
        assert "ok    rank 0 over shm" in output
        assert "ok    rank 0 over tcp" in output

        status, output = doctor("--peer", url)
        assert status == 1
        assert "FAIL  rank 0 over tcp" in output

        topology = httpx.get(f"{url}/kv/topology").json()
        number = url.rsplit(":", 1)[1]
        status, output = doctor("--instance", f"role=both,http={number},kv={topology['port']}")
        assert status == 1
        assert f"port {number} on 127.0.0.1, wanted for HTTP, is taken by" in output
        assert "wanted for KV side channel, is taken by" in output


@pytest.mark.timeout(120)
def test_standalone_instance_has_no_topology(tmp_path: Path) -> None:
    with serving(MODEL, tmp_path, "both", *OPTIONS) as url:
        answer = httpx.get(f"{url}/kv/topology")
        assert answer.status_code == 404
        assert "no KV connector" in answer.json()["error"]["message"]
