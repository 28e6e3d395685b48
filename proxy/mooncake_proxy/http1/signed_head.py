"""Requests whose head is signed with a shared secret, so that bodies of strangers are not read.

The header's value is `WORDS.SHA256-OF-BODY.HMAC`; the digests are hexadecimal, the words the
sender's own.
"""

from __future__ import annotations

import hmac
from hashlib import sha256


def signed_head(secret: bytes, words: str, body: bytes) -> str:
    """The header's value for a body."""
    text = f"{words}.{sha256(body).hexdigest()}"
    return f"{text}.{hmac.digest(secret, text.encode(), 'sha256').hex()}"


def signed_digest(secret: bytes, value: bytes) -> str | None:
    """The digest of the body that a head is signed for; None where it is not."""
    text, _, signature = value.rpartition(b".")
    wanted = hmac.digest(secret, text, "sha256").hex().encode()
    if not hmac.compare_digest(wanted, signature):
        return None
    return text.rpartition(b".")[2].decode("latin-1")


def is_signed(secret: bytes, value: bytes, body: bytes) -> bool:
    """Whether head and body belong together, and come from who has the secret."""
    digest = signed_digest(secret, value)
    return digest is not None and hmac.compare_digest(digest, sha256(body).hexdigest())
