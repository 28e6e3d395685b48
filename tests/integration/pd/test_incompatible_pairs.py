"""An incompatible pair behind a proxy: no request pays for detecting it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.pd_processes import serving
from support.programs import TINY_LLAMA, running
from support.push import LAYERWISE
from support.transports import tls_settings

CONNECTORS = {"pull": "MooncakeConnector", "push": LAYERWISE}
BODY = {"model": "tiny-llama", "prompt": "A language model answers", "max_tokens": 8}


@pytest.mark.parametrize(
    ("flow", "difference"),
    [("pull", "dtype"), ("push", "dtype"), ("pull", "secret"), ("pull", "tls")],
)
def test_proxy_avoids_incompatible_pair(flow: str, difference: str, tmp_path: Path) -> None:
    own, other = {
        "dtype": lambda: ([], ["--dtype", "float32"]),
        "secret": lambda: secrets(tmp_path),
        "tls": lambda: (["--transport", "tcp"], ["--transport", "tcp"]),
    }[difference]()
    files = tls_settings() if difference == "tls" else {}
    environment = {"MOONCAKE_HAL_TCP": " ".join(f"{name}={path}" for name, path in files.items())}
    options = ("--kv-connector", CONNECTORS[flow], "--num-kv-blocks", "512")
    with (
        serving(TINY_LLAMA, "prefill", *options, *own) as prefill,
        serving(TINY_LLAMA, "decode", *options, *other, environment=environment) as decode,
    ):
        proxy_options = ("--port", "0", "--flow", flow, "--prefill", prefill.url)
        with running("mooncake_proxy", *proxy_options, "--decode", decode.url) as proxy:
            url = proxy.wait_for("listens on").split()[-1]
            for count in (1, 2):
                ask(url)
                assert figure(url, "mooncake_proxy_local_prefill_total") == count
            assert figure(decode.url, "mooncake:kv_transfer_refused_peers_total") == 0
            assert figure(decode.url, "mooncake:kv_transfer_refused_loads_total") == 0
            assert "is incompatible with" in proxy.error_text
        unchecked = ("--health-interval", "0", "--decode", decode.url)
        with running("mooncake_proxy", *proxy_options, *unchecked) as proxy:
            ask(proxy.wait_for("listens on").split()[-1])
            assert figure(decode.url, "mooncake:kv_transfer_refused_peers_total") == 1
            assert figure(decode.url, "mooncake:kv_transfer_refused_loads_total") == 1


def secrets(folder: Path) -> list[list[str]]:
    """The options of two instances with different secrets."""
    paths = [folder / name for name in ("old", "new")]
    for path in paths:
        path.write_text(f"the {path.name} secret of all")
    return [["--kv-secret-file", str(path)] for path in paths]


def ask(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]


def figure(url: str, name: str) -> float:
    """A metric's sum over its labels; 0 where it has none yet."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))
