"""The shm transport, loaded."""

from __future__ import annotations

from functools import cached_property

from mooncake_hal.errors import TransferError
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports import handshake
from mooncake_hal.transports.shm import control, host
from mooncake_hal.transports.shm.copier import Copier, NumpyCopier, best_copier
from mooncake_hal.transports.shm.endpoint import ShmEndpoint


class ShmTransport:
    """See ``mooncake_hal.transport.Transport``.

    Args:
        copier: what copies; None chooses.
    """

    name = control.NAME
    can_revoke = True

    def __init__(self, copier: Copier | None = None) -> None:
        self._given = copier

    def open(self, options: EndpointOptions) -> ShmEndpoint:
        """See ``Transport``. ``options.connections`` is the number of copying threads.

        Raises:
            ValueError: ``options.extra`` is not empty, or there would be no thread.
        """
        if options.extra:
            raise ValueError(f"shm has no extra settings, got {sorted(options.extra)}")
        if options.connections < 1:
            raise ValueError(f"connections must be 1 or more, got {options.connections}")
        host.allow_peers_to_reach_us()
        return ShmEndpoint(options, self._copier)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``."""
        try:
            ours = handshake.decode_address(local, control.Address, self.name)
            theirs = handshake.decode_address(remote, control.Address, self.name)
        except TransferError as exc:
            return str(exc)
        if ours.version != theirs.version:
            return f"one end speaks version {ours.version}, the other {theirs.version}"
        if ours.host != theirs.host:
            return "they are on different hosts or in different network namespaces"
        return None

    @cached_property
    def _copier(self) -> Copier:
        return self._given or best_copier()


def load() -> ShmTransport:
    """Construct the transport."""
    return ShmTransport()


def load_interpreted() -> ShmTransport:
    """Construct it without compiled code, as it is on a host that has no compiler."""
    return ShmTransport(NumpyCopier())
