"""Image tags are resolved to digests by a registry, here a small one on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.deploy import ROOT, load_script

base_images = load_script("base_images")
DIGEST = "sha256:" + "1234567890abcdef" * 4
OLD = "sha256:" + "0" * 64


class Registry(BaseHTTPRequestHandler):
    """Serves ``python:3.12-slim`` and requires a token, as Docker Hub does."""

    def do_GET(self) -> None:
        is_token = self.path == "/token?service=here&scope=repository%3Apython%3Apull"
        self._reply(200 if is_token else 404, json.dumps({"token": "anybody"}).encode())

    def do_HEAD(self) -> None:
        host = f"127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.headers["Authorization"] != "Bearer anybody":
            challenge = f'Bearer realm="http://{host}/token",service="here"'
            scope = 'scope="repository:python:pull"'
            self._reply(401, headers={"WWW-Authenticate": f"{challenge},{scope}"})
        elif self.path == "/v2/python/manifests/3.12-slim" and "index" in self.headers["Accept"]:
            self._reply(200, headers={"Docker-Content-Digest": DIGEST})
        else:
            self._reply(404)

    def _reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def registry() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_dockerfiles_get_current_digests(
    registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged = f"{registry}/python:3.12-slim"
    for name, begin in (("one", tagged), ("two", f"{tagged}@{OLD}")):
        text = f"ARG PYTHON_IMAGE={begin}\nARG PORT=1\nFROM ${{PYTHON_IMAGE}}\n"
        (tmp_path / f"Dockerfile.{name}").write_text(text)
    monkeypatch.setattr(base_images, "DOCKERFILES", tmp_path)
    assert base_images.main([]) == 0
    expected = f"ARG PYTHON_IMAGE={tagged}@{DIGEST}\nARG PORT=1\nFROM ${{PYTHON_IMAGE}}\n"
    assert {path.read_text() for path in tmp_path.iterdir()} == {expected}


def test_digest_of_named_image_is_printed(
    registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert base_images.main([f"{registry}/python:3.12-slim"]) == 0
    assert capsys.readouterr().out == f"{registry}/python:3.12-slim@{DIGEST}\n"


def test_unknown_tag_is_reported_and_nothing_is_written(
    registry: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = f"ARG PYTHON_IMAGE={registry}/python:2.0\n"
    (tmp_path / "Dockerfile.one").write_text(text)
    monkeypatch.setattr(base_images, "DOCKERFILES", tmp_path)
    assert base_images.main([]) == 1
    error = capsys.readouterr().err
    assert f"can't resolve {registry}/python:2.0 at {registry}: HTTP Error 404" in error
    assert (tmp_path / "Dockerfile.one").read_text() == text


def test_all_base_images_are_found() -> None:
    for path in (ROOT / "deploy" / "docker").glob("Dockerfile.*"):
        assert len(base_images._BASE.findall(path.read_text())) in (1, 2)
