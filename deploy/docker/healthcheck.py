"""Container health check: exits 0 if MOONCAKE_HEALTH_URL answers 200. Slim images have no curl."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 2.0


def is_healthy(url: str) -> bool:
    """Whether the URL answers 200 in time. Proxy settings of the environment are ignored."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if is_healthy(os.environ["MOONCAKE_HEALTH_URL"]) else 1)
