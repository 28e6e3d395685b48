"""The transport around an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mooncake_hal.transport import Endpoint, EndpointOptions
from mooncake_hal.transports.adapter.agent import Engine
from mooncake_hal.transports.adapter.driver import AdapterDriver
from mooncake_hal.transports.adapter.facts import (
    VERSION,
    ComparePlaces,
    anywhere,
    decode_facts,
    why_apart,
)
from mooncake_hal.transports.control.endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.control.table import AttachedRegions


class AdapterTransport:
    """See ``Transport``.

    Args:
        name: of the transport.
        configure: makes the engine for an endpoint. Raises ValueError for settings that it does
            not know, TransportUnavailable if the host lacks what they ask for.
        compare_places: says whether two of its engines reach each other.
    """

    can_revoke = False  # what a peer's engine has begun, this side can't stop

    def __init__(
        self,
        name: str,
        configure: Callable[[EndpointOptions], Engine],
        compare_places: ComparePlaces = anywhere,
    ) -> None:
        self.name = name
        self._configure = configure
        self._compare_places = compare_places

    def open(self, options: EndpointOptions) -> Endpoint:
        """See ``Transport``."""
        local = AttachedRegions("this side")
        driver = AdapterDriver(self._configure(options), local, self._compare_places)
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``: compares what the engines speak, and where they stand."""
        compare = partial(why_apart, compare_places=self._compare_places)
        return compare_addresses((local, remote), self.name, VERSION, decode_facts, compare)


def chosen_settings(name: str, extra: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    """Return the settings, with the defaults of those that are not given.

    Raises:
        ValueError: one is not known.
    """
    unknown = sorted(set(extra) - set(known))
    if unknown:
        raise ValueError(f"{name} has no settings {unknown}; it has {sorted(known)}")
    return {**known, **extra}
