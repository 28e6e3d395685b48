"""A fleet without a static list: instances register themselves with a proxy, and deregister."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.ports import free_range
from support.programs import TINY_LLAMA, Program, running

LEASE_S = 5.0
TIMEOUT_S = 60.0


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("of the instances of this fleet\n")
    return path


@pytest.fixture
def proxy_url() -> str:
    return f"http://127.0.0.1:{free_range(1).first}"


@contextmanager
def proxy(url: str, secret: Path, *options: str) -> Iterator[Program]:
    port = url.rpartition(":")[2]
    argv = ["mooncake_proxy", "--port", port, "--register-secret-file", str(secret), *options]
    with running(*argv) as program:
        program.wait_for("http://")
        yield program


@contextmanager
def instance(role: str, proxy_url: str, secret: Path) -> Iterator[Program]:
    argv = ["mooncake_engine.cli", "serve", str(TINY_LLAMA), "--role", role, "--port", "0"]
    argv += ["--num-kv-blocks", "256", "--register", proxy_url, "--register-lease", str(LEASE_S)]
    with running(*argv, "--register-secret-file", str(secret)) as program:
        program.wait_for("ready http://")
        yield program


def instances(url: str) -> list[dict[str, Any]]:
    try:
        return list(httpx.get(f"{url}/health").json()["instances"])
    except httpx.TransportError:
        return []


def until(url: str, condition: Callable[[list[str]], bool]) -> list[str]:
    """Wait until the roles of the instances that are up are as expected."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        roles = sorted(each["role"] for each in instances(url) if each["state"] == "up")
        if condition(roles):
            return roles
        assert time.monotonic() < deadline, instances(url)
        time.sleep(0.05)


def ask(url: str) -> httpx.Response:
    body = {"model": "tiny-llama", "prompt": "A language model answers", "max_tokens": 8}
    return httpx.post(f"{url}/v1/completions", json=body | {"temperature": 0}, timeout=60)


@pytest.mark.timeout(300)
def test_instances_register_again_after_proxy_restart(proxy_url: str, secret: Path) -> None:
    with instance("prefill", proxy_url, secret) as p, instance("decode", proxy_url, secret) as d:
        with proxy(proxy_url, secret, "--workers", "2"):
            assert until(proxy_url, lambda roles: len(roles) == 2) == ["decode", "prefill"]
            expected = ask(proxy_url)
            assert expected.status_code == 200, expected.text
        # it starts with an empty pool, and instances register
        with proxy(proxy_url, secret) as second:
            until(proxy_url, lambda roles: len(roles) == 2)
            generated = ask(proxy_url).json()["choices"][0]["text"]
            assert generated == expected.json()["choices"][0]["text"]
            p.process.send_signal(signal.SIGTERM)
            until(proxy_url, lambda roles: roles == ["decode"])
            assert p.wait() == 0
            assert "has not renewed" not in second.error_text, "deregistered, not timed out"
            d.process.kill()
            deadline = time.monotonic() + TIMEOUT_S
            while instances(proxy_url):
                assert time.monotonic() < deadline, "a lease that is not renewed expires"
                time.sleep(0.05)
            assert "has not renewed" in second.error_text


@pytest.mark.timeout(120)
def test_registration_with_other_secret_is_rejected(
    proxy_url: str, secret: Path, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("of another fleet altogether")
    with proxy(proxy_url, secret), instance("both", proxy_url, wrong) as refused:
        deadline = time.monotonic() + TIMEOUT_S
        while "not registered at" not in refused.error_text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "status 403" in refused.error_text
        assert instances(proxy_url) == []
        answer = httpx.post(f"{proxy_url}/register", content=json.dumps({"url": "http://x:1"}))
        assert answer.status_code == 403
        secret_is_right_later = refused.error_text.count("not registered at")
        time.sleep(2.5)
        assert refused.error_text.count("not registered at") == secret_is_right_later, "logged once"
        assert refused.end() == 0
