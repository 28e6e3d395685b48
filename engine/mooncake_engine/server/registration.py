"""Registers an instance with proxies (``--register``), so that they need no list of instances.

One thread per proxy posts an announcement every third of the lease, and a last one when the
instance starts to drain. A proxy that can't be reached is retried indefinitely, so that a restarted
proxy knows all instances after a third of a lease.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from mooncake_api.instance_protocol import (
    REGISTER_HEADER,
    REGISTER_PATH,
    RegistrationMessage,
    signed_head,
)
from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.server.server_options import ServerOptions

logger = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 2.0
"""Seconds that ``Registration.close`` waits for proxies to receive the last announcement."""


def check_registration(host: str, options: ServerOptions) -> None:
    """Raises ConfigError if proxies could not reach an instance at the address it listens on."""
    if options.register and options.register_url is None and host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--register needs --register-url http://HOST:PORT: proxies can't reach {host}"
        )


def registration_of(role: Role, options: ServerOptions, url: str) -> Registration:
    """The registration of an instance that listens at ``url``, with the proxies of its options."""
    own = options.register_url or url
    message = RegistrationMessage(
        own, time.time(), role=role.value, lease_s=options.register_lease_s
    )
    return Registration(options.register, options.register_secret, message)


class Registration:
    """Keeps an instance registered with proxies, from ``start`` to ``close``.

    Args:
        proxies: the proxies' URLs, with the admin port where they have one.
        secret: the secret that proxies and instances share.
        message: what is sent, but for its number.
    """

    def __init__(self, proxies: Sequence[str], secret: str, message: RegistrationMessage) -> None:
        self._secret = secret.encode()
        self._message = message
        self._leaving = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._keep_registered, args=(url,), name="registration", daemon=True
            )
            for url in proxies
        ]

    def start(self) -> None:
        """Start the threads that announce the instance."""
        for thread in self._threads:
            thread.start()

    def unregister(self) -> None:
        """Tell the proxies to send no more requests. Does not block; idempotent."""
        self._leaving.set()

    def close(self) -> None:
        """Unregister, and wait a short time for the proxies to receive that."""
        self.unregister()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(deadline - time.monotonic(), 0))

    def _keep_registered(self, proxy: str) -> None:
        number, was_accepted, pause_s = 0, None, 0.0
        while not self._leaving.wait(pause_s):
            is_accepted = self._announce(proxy, number, was_accepted, is_draining=False)
            if is_accepted and not was_accepted:
                logger.info("registered at %s as %s", proxy, self._message.url)
            renewal_s = self._message.lease_s / 3
            pause_s = renewal_s if is_accepted else min(renewal_s, _RETRY_S)
            was_accepted, number = is_accepted, number + 1
        if was_accepted:
            self._announce(proxy, number, was_accepted, is_draining=True)

    def _announce(
        self, proxy: str, number: int, was_accepted: bool | None, *, is_draining: bool
    ) -> bool:
        """Send an announcement; returns whether the proxy accepted it. Of consecutive failures only
        the first is logged."""
        message = msgspec.structs.replace(self._message, number=number, is_draining=is_draining)
        try:
            self._post(proxy, msgspec.json.encode(message))
        except (OSError, http.client.HTTPException, _Rejected) as exc:
            if was_accepted is not False:
                logger.warning("not registered at %s: %s; retrying", proxy, exc or type(exc))
            return False
        return True

    def _post(self, proxy: str, body: bytes) -> None:
        parts = urlsplit(proxy)
        is_tls = parts.scheme == "https"
        connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = connect(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        headers = {
            "Content-Type": "application/json",
            REGISTER_HEADER: signed_head(self._secret, "instance", body),
            "Connection": "close",
        }
        try:
            connection.request("POST", f"{parts.path.rstrip('/')}{REGISTER_PATH}", body, headers)
            response = connection.getresponse()
            answer = response.read(2000).decode(errors="replace")
        finally:
            connection.close()
        if response.status != 200:
            raise _Rejected(f"status {response.status}: {answer}")


class _Rejected(Exception):
    """A proxy rejected the announcement."""
