"""A timeout around awaits that never loses a cancellation.

`asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives in the same iteration of
the event loop as the result (python/cpython#86296): a client's disconnect or a shutdown would go
unnoticed.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
