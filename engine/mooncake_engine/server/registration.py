"""An instance announces itself to proxies (``--register``), so that a fleet needs no list.

A thread per proxy posts what the instance is every third of the lease, and when it begins to drain,
that it leaves. A proxy that is away is tried again and again: one that is restarted knows the fleet
a third of a lease later.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import urlsplit

from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.server.server_options import ServerOptions

log = logging.getLogger(__name__)

PATH = "/register"
HEADER = "X-Mooncake-Register"
_TIMEOUT_S = 3.0
_RETRY_S = 1.0
_LEAVING_S = 2.0
"""How long the end waits for proxies to be told."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What an instance says of itself.

    Args:
        url: where proxies reach it.
        role: what it does.
        lease_s: how long it counts without being renewed.
        started_at: seconds since 1970; of two instances at one URL the later one counts.
    """

    url: str
    role: Role
    lease_s: float
    started_at: float

    def body(self, number: int, *, is_leaving: bool) -> bytes:
        """The message, numbered: proxies take no old one again."""
        fields = {
            "url": self.url,
            "role": self.role.value,
            "lease_s": self.lease_s,
            "started_at": self.started_at,
            "number": number,
            "is_leaving": is_leaving,
        }
        return json.dumps(fields).encode()


def check_registration(host: str, options: ServerOptions) -> None:
    """Raises ConfigError if proxies would not know where to reach an instance on this host."""
    if options.register and options.register_url is None and host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--register needs --register-url http://HOST:PORT: proxies can't reach {host}"
        )


def registration_of(role: Role, options: ServerOptions, url: str) -> Registration:
    """Of an instance that listens at this URL, with the proxies that its options name."""
    own = options.register_url or url
    announcement = Announcement(own, role, options.register_lease_s, time.time())
    return Registration(options.register, options.register_secret, announcement)


def signed_head(secret: bytes, words: str, body: bytes) -> str:
    """The header's value: ``WORDS.SHA256-OF-BODY.HMAC``, as the proxy checks it."""
    text = f"{words}.{sha256(body).hexdigest()}"
    return f"{text}.{hmac.digest(secret, text.encode(), 'sha256').hex()}"


class Registration:
    """Keeps an instance registered, from ``start`` to ``close``.

    Args:
        proxies: their URLs, at the admin port where they have one.
        secret: that proxies and instances share.
        announcement: what is said.
    """

    def __init__(self, proxies: Sequence[str], secret: str, announcement: Announcement) -> None:
        self._secret = secret.encode()
        self._announcement = announcement
        self._leaving = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(url,), name="registration", daemon=True)
            for url in proxies
        ]

    def start(self) -> None:
        """Begin to announce."""
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Tell the proxies that no more requests are wanted. Does not wait; idempotent."""
        self._leaving.set()

    def close(self) -> None:
        """The same, and wait for them to be told, for a moment."""
        self.leave()
        deadline = time.monotonic() + _LEAVING_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0))

    def _keep(self, proxy: str) -> None:
        number, was_taken, pause_s = 0, None, 0.0
        while not self._leaving.wait(pause_s):
            is_taken = self._tell(proxy, number, was_taken, is_leaving=False)
            if is_taken and not was_taken:
                log.info("registered at %s as %s", proxy, self._announcement.url)
            renewal_s = self._announcement.lease_s / 3
            pause_s = renewal_s if is_taken else min(renewal_s, _RETRY_S)
            was_taken, number = is_taken, number + 1
        if was_taken:
            self._tell(proxy, number, was_taken, is_leaving=True)

    def _tell(self, proxy: str, number: int, was_taken: bool | None, *, is_leaving: bool) -> bool:
        """Whether the proxy took it; the first refusal in a row is logged."""
        body = self._announcement.body(number, is_leaving=is_leaving)
        try:
            self._post(proxy, body)
        except (OSError, http.client.HTTPException, _Refused) as exc:
            if was_taken is not False:
                log.warning("not registered at %s: %s; trying again", proxy, exc or type(exc))
            return False
        return True

    def _post(self, proxy: str, body: bytes) -> None:
        parts = urlsplit(proxy)
        is_tls = parts.scheme == "https"
        connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = connect(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        signed = signed_head(self._secret, "instance", body)
        headers = {"Content-Type": "application/json", HEADER: signed, "Connection": "close"}
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}{PATH}", body, headers)
            response = connection.getresponse()
            answer = response.read(2000).decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise _Refused(f"status {response.status}: {answer}")


class _Refused(Exception):
    """A proxy does not take the announcement."""
