"""Which hosts an operator lets others have an instance connect to."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from mooncake_kv.errors import KVConfigError


def plain_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address without its zone, and IPv4 as such; None for what is none."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


class AllowedHosts:
    """Hosts that an operator allows requests to name. False if there are none.

    Args:
        allowed: hosts, addresses and networks, or ``*``.
        option: that lists them.

    Raises:
        KVConfigError: one of them can be neither.
    """

    def __init__(self, allowed: Sequence[str], option: str) -> None:
        networks = {text: _network(text, option) for text in allowed}
        self._networks = [network for network in networks.values() if network is not None]
        self._hosts = {text.lower() for text, network in networks.items() if network is None}

    def __bool__(self) -> bool:
        return bool(self._networks or self._hosts)

    def names(self, host: str) -> bool:
        """Whether a host may be connected to wherever it is."""
        return host.lower() in self._hosts or "*" in self._hosts

    def permits(self, host: str, address: str) -> bool:
        """Whether this address of a host may be connected to.

        Args:
            host: as it was named.
            address: of that host.
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
