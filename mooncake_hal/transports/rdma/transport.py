"""The ``rdma`` transport."""

from __future__ import annotations

from mooncake_hal.transport import Endpoint, EndpointOptions
from mooncake_hal.transports.control.endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.rdma.compat import import_enums
from mooncake_hal.transports.rdma.driver import NAME, RdmaDriver
from mooncake_hal.transports.rdma.facts import VERSION, decode_facts, why_unreachable


class RdmaTransport:
    """See ``Transport``.

    Raises:
        TransportUnavailable: pyverbs does not load.
    """

    name = NAME
    can_revoke = True

    def __init__(self) -> None:
        import_enums()

    def open(self, options: EndpointOptions) -> Endpoint:
        """See ``Transport``."""
        local = AttachedRegions("this side")
        driver = RdmaDriver(options, local)
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``: looks at link layers, subnets and address families."""
        return compare_addresses(
            (local, remote),
            NAME,
            VERSION,
            decode_facts,
            lambda ours, theirs: why_unreachable(ours.rails, theirs.rails),
        )
