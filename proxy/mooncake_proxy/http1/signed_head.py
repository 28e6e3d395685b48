"""Requests with a signed header, so that bodies from unauthenticated senders need not be read.

The header's value is `WORDS.SHA256-OF-BODY.HMAC`. The digests are hexadecimal; the sender chooses
the words. Used by peer proxies and by instances that register themselves.
"""

from __future__ import annotations

import hmac
from hashlib import sha256


def signed_head(secret: bytes, words: str, body: bytes) -> str:
    """The signed header's value for `body`."""
    text = f"{words}.{sha256(body).hexdigest()}"
    return f"{text}.{hmac.digest(secret, text.encode(), 'sha256').hex()}"


def signed_digest(secret: bytes, value: bytes) -> str | None:
    """The digest of the body for which the header is signed; None if the signature is wrong."""
    text, _, signature = value.rpartition(b".")
    wanted = hmac.digest(secret, text, "sha256").hex().encode()
    if not hmac.compare_digest(wanted, signature):
        return None
    return text.rpartition(b".")[2].decode("latin-1")


def is_signed(secret: bytes, value: bytes, body: bytes) -> bool:
    """Whether the header is signed with the secret, and for this body."""
    digest = signed_digest(secret, value)
    return digest is not None and hmac.compare_digest(digest, sha256(body).hexdigest())
