"""The address on which an instance listens for peers, and the one that it advertises to them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

from mooncake_hal.session.addressing import is_loopback
from mooncake_hal.timing import timeout
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError

logger = logging.getLogger(__name__)

_PROBE_TARGETS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849), used to ask the kernel for our address on the
default route."""

LOOKUP_TIMEOUT_S = 5.0
MAX_LOOKUPS = 8
"""Concurrent lookups of names; others are queued."""


def settle_addresses(config: KVTransferConfig) -> KVTransferConfig:
    """Resolve the listening and the advertised address, and choose the latter if it is not
    configured.

    Raises:
        KVConfigError: a name has no address; or the instance listens on all addresses, and there is
            no default route by which to choose the advertised one; or it is reachable from other
            hosts without a secret.
    """
    host = resolve(config.host, "--kv-host")
    if not config.secret:
        _check_open(host, is_allowed=config.allow_no_secret)
    if config.advertise_host:
        advertised = resolve(config.advertise_host, "--kv-advertise-host")
        if ipaddress.ip_address(advertised).is_unspecified:
            raise KVConfigError(
                f"peers can't connect to --kv-advertise-host {advertised}: give the address of one "
                "interface"
            )
    elif ipaddress.ip_address(host).is_unspecified:
        advertised = _default_route_address(host)
        logger.warning(
            "listening on %s; advertising %s, the address of the default route, to peers: set "
            "--kv-advertise-host to use another one",
            host,
            advertised,
        )
    else:
        advertised = host
    return replace(config, host=host, advertise_host=advertised)


def _check_open(host: str, *, is_allowed: bool) -> None:
    """Raise KVConfigError if an instance without a secret would be reachable from other hosts."""
    if is_loopback(host):
        who = "every user of this host"
    elif is_allowed:
        who = f"anyone who can reach {host}"
    else:
        raise KVConfigError(
            f"listening on --kv-host {host} without a secret, anyone who can reach it could read "
            "and write KV: give all instances the same --kv-secret-file, or confirm with "
            "--kv-allow-no-secret that the network is closed to others"
        )
    logger.warning("no --kv-secret-file: %s may read and write this instance's KV", who)


def resolve(host: str, option: str) -> str:
    """The address of a host, which may be a name, or an address with or without brackets.

    Raises:
        KVConfigError: the host has no address.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise KVConfigError(f"{option} {host!r} has no address: {exc}") from exc
    return str(found[0][4][0])


def _default_route_address(host: str) -> str:
    """Our address on the default route. Sends no packet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((_PROBE_TARGETS[family], 9))
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise KVConfigError(
            f"listening on {host}, no address can be advertised to peers: there is no default "
            f"route ({exc}); give one with --kv-advertise-host"
        ) from exc


async def is_own_address(host: str) -> bool:
    """Whether the host is this one: all of its addresses can be bound here. False if it can't be
    resolved in time."""
    try:
        for family, address in await _look_up(host):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
    except OSError:
        return False
    return True


async def addresses_of(host: str) -> list[str]:
    """All addresses of a host; raises OSError or ValueError if it can't be resolved in time."""
    return [str(address[0]) for _, address in await _look_up(host)]


async def _look_up(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The families and socket addresses of a host; raises as ``addresses_of``."""
    try:
        found = _resolve(host, socket.AI_NUMERICHOST)  # asks no name server
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        try:
            async with timeout(LOOKUP_TIMEOUT_S):
                found = await loop.run_in_executor(_name_threads(), _resolve, host, 0)
        except asyncio.TimeoutError as exc:
            raise OSError(
                errno.ETIMEDOUT, f"{host} was not resolved within {LOOKUP_TIMEOUT_S:g} s"
            ) from exc
    return [(family, address) for family, *_, address in found]


def _resolve(host: str, flags: int) -> Any:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=flags)


@cache
def _name_threads() -> ThreadPoolExecutor:
    """The threads that resolve names here. Not the loop's own: those resolve the side channels that
    requests name, and a few names of a slow name server occupy them all."""
    return ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="kv-names")
