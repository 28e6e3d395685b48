"""The ``staged`` transport, loaded."""

from __future__ import annotations

from collections.abc import Callable

from mooncake_hal.errors import DeviceError, TransferError, TransportUnavailable
from mooncake_hal.transport import Endpoint, EndpointOptions, Transport
from mooncake_hal.transports.control.endpoint import ControlledEndpoint, read_address
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.tcp.transport import load as load_tcp
from mooncake_hal_cuda.copying.copier import Copier, MakeCopier
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.driver import device_index
from mooncake_hal_cuda.staged.driver import StagedDriver
from mooncake_hal_cuda.staged.messages import NAME, VERSION, decode_facts
from mooncake_hal_cuda.staged.staging import Gpu


class StagedTransport:
    """See ``Transport``.

    Args:
        load_driver: called for endpoints of a device; DeviceError where there is no hardware.
        make_copier: another one only in tests.
    """

    name = NAME
    can_revoke = True

    def __init__(
        self, load_driver: Callable[[], CudaDriver], make_copier: MakeCopier = Copier
    ) -> None:
        self._load_driver = load_driver
        self._make_copier = make_copier
        self._tcp: Transport = load_tcp()

    def open(self, options: EndpointOptions) -> Endpoint:
        """See ``Transport``. Extra settings are those of tcp, whose own port is a free one."""
        local = AttachedRegions("this side")
        driver = StagedDriver(self._gpu(options.device), self._tcp, options, local)
        try:
            return ControlledEndpoint(driver, local, options)
        except BaseException:
            driver.close()
            raise

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``."""
        try:
            ours, theirs = (read_address(data, NAME, VERSION) for data in (local, remote))
            inner = decode_facts(ours.facts).inner, decode_facts(theirs.facts).inner
        except TransferError as exc:
            return str(exc)
        return self._tcp.reaches(*inner)

    def _gpu(self, device: str) -> Gpu | None:
        if device == "cpu":
            return None
        index = device_index(device)
        try:
            return Gpu(self._load_driver(), index, self._make_copier)
        except DeviceError as exc:
            raise TransportUnavailable(NAME, str(exc)) from exc


def load() -> StagedTransport:
    """Construct the transport."""
    return StagedTransport(CudaDriver)
