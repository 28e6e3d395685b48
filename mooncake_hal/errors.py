"""Every error of the hardware layer.

HalError
├── PluginError               a plugin is broken: wrong spec, wrong API version, duplicate name
├── BackendNotFound           no installed plugin offers a backend of that name
├── BackendUnavailable        the plugin is installed, but its hardware or driver is missing
├── CapabilityError           a request that this backend's capabilities rule out
├── PlanError                 KV of two ranks that can't be mapped onto each other
├── DeploymentRefused         instances that can't work together, or ports that are in use
├── PortsExhausted            a port range with no free port left
├── NativeUnavailable         a compiled helper that this machine can't build or load
├── DevelopmentToolsMissing   a command that needs mooncake-hal-testing, which is not installed
├── DeviceError               a device operation was rejected or failed
│   └── OutOfMemory
└── TransferError             KV did not arrive
    ├── TransportUnavailable  this host lacks the transport, or it can't reach the peer
    │   └── NoTransportFits   no transport connects the two ends, as long as both run
    ├── PeerLost              the peer died, closed the connection or broke the protocol
    ├── TransferTimeout       the deadline passed; the transfer was drained
    ├── TransferCancelled     cancelled by this side; drained
    ├── AccessDenied          the peer did not prove that it belongs to the deployment
    ├── RegionUnknown         an address in no registered region
    ├── RegionRevoked         an address in a region that has been revoked
    ├── OutOfBounds           a span that crosses the end of its region
    ├── RequestRejected       the peer received a request and rejected it
    ├── RequestNotSent        this end could not send a request; the session stays open
    └── VersionMismatch       the two ends use different protocol versions
"""

from __future__ import annotations


class HalError(Exception):
    """Base of everything that mooncake_hal raises on purpose."""


class PluginError(HalError):
    """A plugin is broken: it can't be imported or loaded, or it violates the contract."""


class BackendNotFound(HalError):
    """No installed plugin offers a backend of that name."""


class BackendUnavailable(HalError):
    """The plugin is installed, but its hardware can't be used here.

    Args:
        name: the backend that was asked for.
        reason: what the probe found, in words for an operator.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"backend {name!r} is unavailable: {reason}")
        self.name = name
        self.reason = reason


class CapabilityError(HalError):
    """A request that the backend's capabilities rule out (dtype, block size, layout, ratio)."""


class NativeUnavailable(HalError):
    """A compiled helper can't be built or loaded here; callers use a slower, named path.

    Args:
        name: the helper.
        reason: what is missing, in words for an operator.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"native helper {name!r} is unavailable: {reason}")
        self.name = name
        self.reason = reason


class PlanError(HalError):
    """The KV of two ranks can't be mapped onto each other exactly."""


class DeploymentRefused(HalError):
    """A deployment violates the compatibility rules, or its ports are in use.

    Args:
        problems: all violations, one sentence each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class PortsExhausted(HalError):
    """A port range has no free port left to listen on."""


class DevelopmentToolsMissing(HalError):
    """A command needs mooncake-hal-testing, which is not installed."""


class DeviceError(HalError):
    """A device rejected an operation, or the operation failed."""


class OutOfMemory(DeviceError):
    """The device does not have enough free memory for an allocation."""


class TransferError(HalError):
    """KV did not arrive. Subclasses say why; the destination's content is undefined."""


class TransportUnavailable(TransferError):
    """This host lacks the transport, or the transport can't reach the peer.

    Args:
        name: the transport that was asked for.
        reason: what is missing, in words for an operator.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"transport {name!r} is unavailable: {reason}")
        self.name = name
        self.reason = reason


class NoTransportFits(TransportUnavailable):
    """No transport can connect two ends, by the addresses that they have published, which stay the
    same as long as both run: other versions or settings, other hosts."""


class PeerLost(TransferError):
    """The peer died, closed the connection, or broke the protocol."""


class TransferTimeout(TransferError):
    """The deadline passed. The transfer was drained: no more of its bytes will move."""


class TransferCancelled(TransferError):
    """This side cancelled the transfer, and it was drained."""


class AccessDenied(TransferError):
    """The peer did not prove that it belongs to the deployment."""


class RegionUnknown(TransferError):
    """An address is in no registered region."""


class RegionRevoked(TransferError):
    """An address is in a region that was registered once and has been revoked."""


class OutOfBounds(TransferError):
    """A span starts in a region and ends outside it."""


class RequestRejected(TransferError):
    """The peer received a request and rejected it; the message has the peer's reason."""


class RequestNotSent(TransferError):
    """A request is too long, or too many are outstanding, so that none of its bytes were sent. The
    session stays open, and its earlier requests stay in flight."""


class VersionMismatch(TransferError):
    """The two ends use different versions of a transport's protocol."""
