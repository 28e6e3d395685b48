"""The ``staged`` transport, loaded."""

from __future__ import annotations

from collections.abc import Callable

from mooncake_hal.errors import DeviceError, TransportUnavailable
from mooncake_hal.transport import Endpoint, EndpointOptions, Transport
from mooncake_hal.transports.control.endpoint import compare_addresses, open_endpoint
from mooncake_hal.transports.control.table import AttachedRegions
from mooncake_hal.transports.tcp.transport import load as load_tcp
from mooncake_hal_cuda.copying.copier import Copier, MakeCopier
from mooncake_hal_cuda.driver import CudaDriver
from mooncake_hal_cuda.ipc.driver import device_index
from mooncake_hal_cuda.staged.driver import StagedDriver
from mooncake_hal_cuda.staged.messages import NAME, VERSION, EndpointFacts, decode_facts
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
        return open_endpoint(driver, local, options)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``."""
        return compare_addresses((local, remote), NAME, VERSION, decode_facts, self._why_apart)

    def _why_apart(self, ours: EndpointFacts, theirs: EndpointFacts) -> str | None:
        return self._tcp.reaches(ours.inner, theirs.inner)

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
