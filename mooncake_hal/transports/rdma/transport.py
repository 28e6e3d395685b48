"""The ``rdma`` transport."""

from __future__ import annotations

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import Endpoint, EndpointOptions
from mooncake_hal.transports.control.endpoint import ControlledEndpoint, read_address
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
        try:
            return ControlledEndpoint(driver, local, options)
        except BaseException:
            driver.close()
            raise

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``: looks at link layers, subnets and address families."""
        try:
            ours, theirs = (read_address(data, NAME, VERSION) for data in (local, remote))
            return why_unreachable(decode_facts(ours.facts).rails, decode_facts(theirs.facts).rails)
        except TransferError as exc:
            return str(exc)
