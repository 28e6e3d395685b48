"""The tcp transport, loaded."""

from __future__ import annotations

from functools import cached_property

from mooncake_hal import native
from mooncake_hal.errors import NativeUnavailable, TransferError
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports import handshake
from mooncake_hal.transports.tcp import wire
from mooncake_hal.transports.tcp.endpoint import TcpEndpoint
from mooncake_hal.transports.tcp.interpreted import InterpretedStreams
from mooncake_hal.transports.tcp.streams import NativeStreams, Streams
from mooncake_hal.transports.tcp.tls import SETTINGS, Tls


class TcpTransport:
    """See ``mooncake_hal.transport.Transport``.

    Args:
        streams: what moves the bytes; None chooses.
    """

    name = wire.NAME
    can_revoke = True

    def __init__(self, streams: Streams | None = None) -> None:
        self._given = streams

    def open(self, options: EndpointOptions) -> TcpEndpoint:
        """See ``Transport``. ``options.extra`` takes the TLS files; see ``Tls.from_settings``.

        Raises:
            ValueError: settings that are unknown, incomplete or out of range.
        """
        unknown = sorted(set(options.extra) - set(SETTINGS))
        if unknown:
            raise ValueError(f"tcp has no settings {unknown}; it has {list(SETTINGS)}")
        if options.connections < 1:
            raise ValueError(f"connections must be 1 or more, got {options.connections}")
        tls = Tls.from_settings(options.extra)
        streams = InterpretedStreams() if tls is not None else self._streams
        return TcpEndpoint(options, streams, tls)

    def reaches(self, local: bytes, remote: bytes) -> str | None:
        """See ``Transport``."""
        try:
            ours = handshake.decode_address(local, wire.Address, self.name)
            theirs = handshake.decode_address(remote, wire.Address, self.name)
        except TransferError as exc:
            return str(exc)
        if ours.version != theirs.version:
            return f"one end speaks version {ours.version}, the other {theirs.version}"
        if ours.tls != theirs.tls:
            return "one side uses TLS, the other does not"
        if wire.is_loopback(theirs.host) and ours.machine != theirs.machine:
            return f"the peer listens on {theirs.host} of another host"
        return None

    @cached_property
    def _streams(self) -> Streams:
        if self._given is not None:
            return self._given
        try:
            return NativeStreams()
        except NativeUnavailable as exc:
            native.warn_fallback("tcp_stream", "sockets of the interpreter", exc.reason)
            return InterpretedStreams()


def load() -> TcpTransport:
    """Construct the transport."""
    return TcpTransport()


def load_interpreted() -> TcpTransport:
    """Construct it without compiled code, as it is on a host that has no compiler."""
    return TcpTransport(InterpretedStreams())
