"""The hosts that an operator allows requests to make an instance connect to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from mooncake_kv.errors import KVConfigError


def plain_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address, without its zone, and with IPv4-mapped addresses as IPv4; None if the text
    is not an address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback_host(host: str) -> bool:
    """Whether a host, which may be a name, can only be reached from its own host."""
    found = plain_address(host)
    return host == "localhost" if found is None else found.is_loopback


class AllowedHosts:
    """Hosts that an operator allows requests to name. Falsy if the list is empty.

    Args:
        allowed: hosts, addresses and networks, or ``*``.
        option: the option that lists them, for error messages.

    Raises:
        KVConfigError: an entry is not a host, address or network.
    """

    def __init__(self, allowed: Sequence[str], option: str) -> None:
        networks = {text: _network(text, option) for text in allowed}
        self._networks = [network for network in networks.values() if network is not None]
        self._hosts = {text.lower() for text, network in networks.items() if network is None}

    def __bool__(self) -> bool:
        return bool(self._networks or self._hosts)

    def names(self, host: str) -> bool:
        """Whether a host may be connected to at any address."""
        return host.lower() in self._hosts or "*" in self._hosts

    def excludes(self, host: str) -> bool:
        """Whether a host may not be connected to, whatever its addresses are."""
        return plain_address(host) is None and not self._networks and not self.names(host)

    def permits(self, host: str, address: str) -> bool:
        """Whether an address of a host may be connected to.

        Args:
            host: the host, as it was named.
            address: an address of that host.
        """
        found = plain_address(address)
        is_inside = found is not None and any(found in network for network in self._networks)
        return is_inside or self.names(host)


def _network(text: str, option: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """An address or a network; None for a name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as exc:
        if "/" in text or not text:
            raise KVConfigError(
                f"{option} wants a host, an address, a network or *, got {text!r}"
            ) from exc
        return None
