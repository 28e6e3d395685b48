"""The ``cuda_ipc`` transport, loaded."""

from __future__ import annotations

from functools import partial

from mooncake_hal.errors import DeviceError, TransportUnavailable
from mooncake_hal.transport import Endpoint, EndpointOptions
from mooncake_hal.transports.control.endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal_cuda.copying.copier import Copier, MakeCopier
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.driver import IpcDriver, why_apart
from mooncake_hal_cuda.ipc.facts import NAME, VERSION, decode_facts
from mooncake_hal_cuda.sharing.devices import DeviceSharing


class IpcTransport:
    """See ``Transport``.

    A revoked region takes no new transfers; a piece that is being copied is not called back.

    Args:
        sharing: the hardware, and how its memory is shared.
        make_copier: another one only in tests.
    """

    name = NAME
    can_revoke = False

    def __init__(self, sharing: DeviceSharing, make_copier: MakeCopier = Copier) -> None:
        self._sharing = sharing
        self._make_copier = make_copier

    def open(self, options: EndpointOptions) -> Endpoint:
        """See ``Transport``.

        Raises:
            ValueError: ``options.extra`` is not empty.
        """
        if options.extra:
            raise ValueError(f"{NAME} has no extra settings, got {sorted(options.extra)}")
        local = AttachedRegions("this side")
        driver = IpcDriver(self._sharing, options, local, self._make_copier)
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``."""
        apart = partial(why_apart, self._sharing)
        return compare_addresses((local, remote), NAME, VERSION, decode_facts, apart)


def load() -> IpcTransport:
    """Load the driver and construct the transport.

    Raises:
        TransportUnavailable: the driver does not load.
    """
    try:
        return IpcTransport(DeviceSharing(CudaDriver()))
    except DeviceError as exc:
        raise TransportUnavailable(NAME, str(exc)) from exc
