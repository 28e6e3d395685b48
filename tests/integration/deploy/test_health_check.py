"""The images' health check against a healthy server, an unhealthy one, and none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

from support.deploy import DEPLOY


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that responds to every GET with that status; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/health"
        finally:
            server.shutdown()
            thread.join()


def status_of(url: str) -> int:
    """Exit status of the check, with an HTTP proxy in the environment that must not be used."""
    environment = os.environ | {"MOONCAKE_HEALTH_URL": url, "http_proxy": "http://127.0.0.1:9"}
    script = DEPLOY / "docker" / "healthcheck.py"
    return subprocess.run([sys.executable, str(script)], env=environment, check=False).returncode


def test_healthy_means_200() -> None:
    with answering(200) as url:
        assert status_of(url) == 0
    with answering(503) as url:
        assert status_of(url) == 1
    assert status_of(url) == 1  # nothing listens there any more
