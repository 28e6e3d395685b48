"""What can be wrong with a request.

RequestRefused
"""

from __future__ import annotations


class RequestRefused(ValueError):
    """A request that says something that can't be said as a chat request, or nothing at all.

    Args:
        message: what was wanted, what was found, what to do.
        param: the field, as a path from the body.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
