"""What engine and proxy must agree on beyond the bodies of the OpenAI API: headers, signatures, the
registration of instances, the priority of batch work, and what both accept as a URL, an origin of
web pages or a key."""

from __future__ import annotations

import hmac
import json
from contextlib import suppress
from hashlib import sha256
from urllib.parse import urlsplit

from msgspec import Struct

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that the whole request may take."""
DP_RANK_HEADER = "X-data-parallel-rank"
"""The data-parallel rank that computes the request, as with vLLM."""
SAFE_REQUEST_ID = r"[A-Za-z0-9._:\-]{1,128}"
"""Regular expression of the request ids that are safe in headers and logs. Requests with another
``X-Request-Id`` get a new id; another ``request_id`` in the body is refused."""
UNSAFE_REQUEST_ID = "request_id may have 1 to 128 characters: letters, digits, and . _ : -"
"""The message of that refusal."""
BATCH_PRIORITY = 1000
"""Requests with this priority or a larger number are batch work: no user waits for the answer."""
MIN_KEY_CHARACTERS = 16
"""Length of an API key below which there is a warning. Short ones are accepted: unlike a secret
between programs they can be tried only against the server, and some clients can't send others."""

REGISTER_PATH = "/register"
REGISTER_HEADER = "X-Mooncake-Register"
"""The signed head of a registration."""


class RegistrationMessage(Struct, frozen=True):
    """What an instance posts to proxies to register (``--register``).

    Args:
        url: the URL at which proxies reach the instance.
        started_at: Unix time of the instance's start; of two instances at one URL the later one
            counts, until its lease has ended.
        number: increases with every message. Proxies reject a number that they have seen, as a
            replay.
        role: prefill, decode or both.
        lease_s: seconds for which a proxy keeps the instance without a renewal.
        is_draining: the instance takes no more requests.
    """

    url: str
    started_at: float
    number: int = 0
    role: str = "both"
    lease_s: float = 15.0
    is_draining: bool = False


# A header is signed with a shared secret, so that bodies from unauthenticated senders need not be
# read. Its value is `WORDS.SHA256-OF-BODY.HMAC`: the digests are hexadecimal, the sender chooses
# the words. Used by instances that register themselves and between proxies. A secret may be
# several, one per line, so that it can be changed on one side after the other: the first signs, and
# all are accepted.


def signed_head(secret: bytes, words: str, body: bytes) -> str:
    """The signed header's value for ``body``."""
    text = f"{words}.{sha256(body).hexdigest()}"
    return f"{text}.{hmac.digest(secret.splitlines()[0], text.encode(), 'sha256').hex()}"


def signed_digest(secret: bytes, value: bytes) -> str | None:
    """The digest of the body for which the header is signed; None if the signature is wrong."""
    text, _, signature = value.rpartition(b".")
    wanted = [hmac.digest(each, text, "sha256").hex().encode() for each in secret.splitlines()]
    if not any([hmac.compare_digest(each, signature) for each in wanted]):  # without an early end
        return None
    return text.rpartition(b".")[2].decode("latin-1")


def is_signed(secret: bytes, value: bytes, body: bytes) -> bool:
    """Whether the header is signed with the secret, and for this body."""
    digest = signed_digest(secret, value)
    return digest is not None and hmac.compare_digest(digest, sha256(body).hexdigest())


def is_http_url(text: str) -> bool:
    """Whether a text is the URL of an HTTP server: with a host name that can be looked up, and a
    valid port if it has one."""
    try:
        parts = urlsplit(text)
        name = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and bool(name) and parts.port != 0
    except ValueError:  # the port is not a number, a part of the name is empty or too long, ...
        return False


def split_origins(text: str) -> tuple[str, ...]:
    """The origins of web pages in the value of ``--allowed-origins``: separated by commas or, as
    vLLM has them, a JSON list. See ``is_origin``."""
    names: object = text.split(",")
    if text.lstrip().startswith("["):
        with suppress(ValueError):  # left as it is, it is no origin
            names = json.loads(text)
    listed = names if isinstance(names, list) else [names]
    return tuple(str(name).strip().rstrip("/").lower() for name in listed if str(name).strip())


def is_origin(text: str) -> bool:
    """Whether a text is an origin of web pages, as browsers send it (``https://chat.example.com``,
    without a path), or ``*`` for all."""
    if text == "*":
        return True
    parts = urlsplit(text) if is_http_url(text) else None
    if parts is None or text != f"{parts.scheme}://{parts.netloc}":
        return False
    return not set("@*").intersection(text)  # a browser's has no user, and patterns are not known
