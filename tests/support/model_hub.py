"""A Hugging Face hub on loopback: a repository per directory, byte counts, injected faults."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

_STALL_S = 4.0
COMMIT = "c0ffee" * 6 + "beef"
_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class ModelHub:
    """The hub's content, its faults, and its request counts.

    Args:
        repositories: directories by ``ORG/NAME``.
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        self.gated: set[str] = set()
        self.cut_after: dict[str, int] = {}
        """Bytes of a file after which the connection is closed, once."""
        self.stall_after: dict[str, int] = {}
        """Bytes of a file after which the transfer stalls for a while, once."""
        self.sent: Counter[str] = Counter()
        """Bytes sent, by file name."""
        self.resumed: list[int] = []
        """Start offsets of requests for the rest of a file."""
        self.url = ""


@contextmanager
def running_hub(repositories: dict[str, Path]) -> Iterator[ModelHub]:
    """A hub that serves until the end of the block."""
    hub = ModelHub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: ModelHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        found = _API.match(self.path) or _FILE.match(self.path)
        if found is None or found["name"] not in self.hub.repositories:
            self._refuse(404, "RepoNotFound")
        elif found["name"] in self.hub.gated:
            self._refuse(403, "GatedRepo")
        elif found["revision"] not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif found.re is _API:
            self._json(self._described(found))
        else:
            path = self.hub.repositories[found["name"]] / found["file"]
            self._send_file(path, has_body=has_body)

    def _described(self, found: re.Match[str]) -> Any:
        if found["what"] == "revision":
            return {"id": found["name"], "sha": COMMIT, "siblings": []}
        directory = self.hub.repositories[found["name"]]
        return [
            {
                "type": "file",
                "path": str(path.relative_to(directory)),
                "size": path.stat().st_size,
                "oid": _etag(path),
            }
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        ]

    def _send_file(self, path: Path, *, has_body: bool) -> None:
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{_etag(path)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not has_body:
            return
        body = data[start:]
        if start:
            self.hub.resumed.append(start)
        if (stall := self.hub.stall_after.pop(path.name, None)) is not None:
            self.wfile.write(body[:stall])
            self.hub.sent[path.name] += stall
            self.close_connection = True
            time.sleep(_STALL_S)
            return
        if (cut := self.hub.cut_after.pop(path.name, None)) is not None:
            body = body[:cut]
            self.close_connection = True
        self.wfile.write(body)
        self.hub.sent[path.name] += len(body)

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Silence."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
