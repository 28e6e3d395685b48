"""The exceptions of this distribution.

RequestRejected
"""

from __future__ import annotations


class RequestRejected(ValueError):
    """A request that is malformed, or that can't be expressed as a chat request.

    Args:
        message: what was wanted, what was found, what to do.
        param: the field at fault, as a path from the body; None if there is no single one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
