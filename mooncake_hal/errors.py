"""Every error of the hardware layer.

HalError
├── PluginError               a plugin is broken: wrong spec, wrong API version, name taken twice
├── BackendNotFound           no installed plugin has that name
├── BackendUnavailable        the plugin is there, the hardware or its driver is not
├── CapabilityError           a request that this backend's capabilities rule out
├── PlanError                 KV of two ranks that can't be mapped onto each other
├── DeploymentRefused         instances that can't work together, or ports that are taken
├── PortsExhausted            a range of ports that has none left
├── NativeUnavailable         a compiled helper that this machine can't build or load
├── DevelopmentToolsMissing   a command that mooncake-hal-testing brings, which is not installed
├── DeviceError               the device refused or failed
│   └── OutOfMemory
└── TransferError             KV did not arrive
    ├── TransportUnavailable  this host or peer can't be reached that way
    ├── PeerLost              the other side is gone or broke the connection
    ├── TransferTimeout       the deadline passed; the transfer was drained
    ├── TransferCancelled     cancelled by this side; drained
    ├── AccessDenied          the peer did not prove that it belongs to the deployment
    ├── RegionUnknown         an address that no registered region holds
    ├── RegionRevoked         the region was registered, and is no longer
    ├── OutOfBounds           a span that leaves its region
    ├── RequestRefused        the peer got a request of ours and refused it
    ├── RequestNotSent        this end can't send it now; the session goes on
    └── VersionMismatch       the two ends speak different protocol versions
"""

from __future__ import annotations


class HalError(Exception):
    """Base of everything that mooncake_hal raises on purpose."""


class PluginError(HalError):
    """A plugin is broken: it can't be imported or loaded, or what it offers breaks the contract."""


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
    """A compiled helper can't be built or loaded here; callers take a slower, named path.

    Args:
        name: the helper.
        reason: what is missing, in words for an operator.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"native helper {name!r} is unavailable: {reason}")
        self.name = name
        self.reason = reason


class PlanError(HalError):
    """KV of two ranks that can't be mapped onto each other exactly."""


class DeploymentRefused(HalError):
    """A deployment that breaks the rules.

    Args:
        problems: everything that is wrong, a sentence each.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class PortsExhausted(HalError):
    """A range of ports that has none left to listen on."""


class DevelopmentToolsMissing(HalError):
    """A command needs mooncake-hal-testing, which is not installed."""


class DeviceError(HalError):
    """The device refused or failed an operation."""


class OutOfMemory(DeviceError):
    """The device has not enough free memory for an allocation."""


class TransferError(HalError):
    """KV did not arrive. Subclasses say why; the destination's content is undefined."""


class TransportUnavailable(TransferError):
    """A transport that this host lacks or that does not reach the peer.

    Args:
        name: the transport that was asked for.
        reason: what is missing, in words for an operator.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"transport {name!r} is unavailable: {reason}")
        self.name = name
        self.reason = reason


class PeerLost(TransferError):
    """The other side died, closed, or broke the protocol."""


class TransferTimeout(TransferError):
    """The deadline passed. The transfer was drained: no more bytes will move."""


class TransferCancelled(TransferError):
    """This side cancelled the transfer, and it was drained."""


class AccessDenied(TransferError):
    """A peer that does not prove that it belongs to the deployment."""


class RegionUnknown(TransferError):
    """An address that lies in no region the peer has registered."""


class RegionRevoked(TransferError):
    """The region was registered once and has been revoked."""


class OutOfBounds(TransferError):
    """A span that begins in a region and leaves it."""


class RequestRefused(TransferError):
    """The peer got a request and refused it; the message has its reason."""


class RequestNotSent(TransferError):
    """Nothing was sent of a request: it is too long, or too many are outstanding. The session goes
    on, and what it has asked before."""


class VersionMismatch(TransferError):
    """The two ends speak different versions of a transport's protocol."""
