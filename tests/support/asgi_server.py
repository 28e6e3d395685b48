"""An ASGI application behind a real server, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from mooncake_engine.server.api_server import bind
from mooncake_engine.server.guarded_connection import GuardedConnection


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    """Serve the application on a thread; yields its URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, loop="uvloop", http=GuardedConnection, ws="none", log_config=None)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
