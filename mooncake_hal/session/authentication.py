"""How the two ends of a session prove that they belong to one deployment. Pure.

The server sends a challenge; the client replies with one of its own and a proof; the server checks
it before it believes anything else, then proves itself in turn. Proofs and the keys that seal the
frames after them are HMAC-SHA256 under the shared secret over a purpose, the protocol, the server's
epoch and both challenges. So a proof can be neither replayed nor reflected, and no key serves two
purposes or two connections.

Each side is a generator without I/O, run by blocking sockets and by asyncio alike.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from mooncake_hal.errors import AccessDenied, PeerLost, TransferError, VersionMismatch

NONCE_BYTES = 32
EPOCH_BYTES = 16

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What msgspec raises for bytes that are not the message that was wanted."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """Server to client, first: which epoch of the server this is, and what to prove."""

    version: int
    epoch: bytes
    nonce: bytes


class ClientHello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Client to server: its own challenge, and its proof."""

    version: int
    nonce: bytes
    proof: bytes


class ServerWelcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Server to client, last: the server's proof, or why there is none."""

    proof: bytes = b""
    refusal: str = ""


class SessionKeys(NamedTuple):
    """Keys that seal the frames of one connection, each for one direction."""

    client: bytes
    server: bytes


class HandshakeStep(NamedTuple):
    """What a side of the handshake does next: send a message, if any, and await one, if asked."""

    message: bytes
    awaits_reply: bool


class Proven(NamedTuple):
    """How a handshake ended that succeeded: the server's epoch, and the keys."""

    epoch: bytes
    keys: SessionKeys


Handshake = Generator[HandshakeStep, bytes, Proven]
"""One side: yields steps, is sent the replies, returns ``Proven`` or raises a TransferError."""


def fresh_nonce() -> bytes:
    """Return random bytes to challenge a peer with."""
    return secrets.token_bytes(NONCE_BYTES)


def fresh_epoch() -> bytes:
    """Return a random identity of an endpoint; a restarted one never has it again."""
    return secrets.token_bytes(EPOCH_BYTES)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What both ends of a session have to agree on.

    Args:
        secret: the deployment's shared secret.
        protocol: name of what is spoken, such as that of a transport.
        version: version of that protocol.
    """

    secret: bytes
    protocol: str
    version: int

    def accept(self, epoch: bytes, refusal: str = "") -> Handshake:
        """Run the server's side: challenge, check the client, prove ourselves.

        A client that is refused gets the reason before the error is raised.

        Args:
            epoch: ours.
            refusal: why this client is let in under no circumstances, whatever it proves.

        Raises:
            VersionMismatch, AccessDenied: see ``check_client``.
            PeerLost: what the client sent is no ClientHello.
        """
        challenge = self.challenge(epoch)
        hello = decode((yield HandshakeStep(encode(challenge), True)), ClientHello)
        try:
            if refusal:
                raise AccessDenied(f"{self.protocol}: {refusal}")
            welcome = self.check_client(challenge, hello)
        except TransferError as exc:
            yield HandshakeStep(encode(ServerWelcome(refusal=str(exc))), False)
            raise
        yield HandshakeStep(encode(welcome), False)
        return Proven(epoch, self.session_keys(challenge, hello))

    def connect(self, epoch: bytes | None) -> Handshake:
        """Run the client's side.

        Args:
            epoch: the server's that is wanted; None takes any.

        Raises:
            VersionMismatch, PeerLost, AccessDenied: see ``respond`` and ``check_server``.
        """
        challenge = decode((yield HandshakeStep(b"", True)), Challenge)
        hello = self.respond(challenge, challenge.epoch if epoch is None else epoch)
        welcome = decode((yield HandshakeStep(encode(hello), True)), ServerWelcome)
        self.check_server(challenge, hello, welcome)
        return Proven(challenge.epoch, self.session_keys(challenge, hello))

    def challenge(self, epoch: bytes) -> Challenge:
        """Server: begin."""
        return Challenge(self.version, epoch, fresh_nonce())

    def respond(self, challenge: Challenge, epoch: bytes) -> ClientHello:
        """Client: check the challenge against the wanted epoch, and prove.

        Raises:
            VersionMismatch: the server speaks another version.
            PeerLost: the server has another epoch than the one whose address we have.
        """
        if challenge.version != self.version:
            raise VersionMismatch(_versions(self.protocol, self.version, challenge.version))
        if challenge.epoch != epoch:
            raise PeerLost(
                f"{self.protocol}: the peer at this address has restarted (another epoch); "
                "get its new address"
            )
        nonce = fresh_nonce()
        return ClientHello(self.version, nonce, self._derive(b"client proof", challenge, nonce))

    def check_client(self, challenge: Challenge, hello: ClientHello) -> ServerWelcome:
        """Server: check the client's proof; return ours.

        Raises:
            VersionMismatch: the client speaks another version.
            AccessDenied: it does not know the secret.
        """
        if hello.version != self.version:
            raise VersionMismatch(_versions(self.protocol, self.version, hello.version))
        wanted = self._derive(b"client proof", challenge, hello.nonce)
        if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(wanted, hello.proof):
            raise AccessDenied(self._denied("the client"))
        return ServerWelcome(proof=self._derive(b"server proof", challenge, hello.nonce))

    def check_server(
        self, challenge: Challenge, hello: ClientHello, welcome: ServerWelcome
    ) -> None:
        """Client: check the server's proof.

        Raises:
            AccessDenied: it does not know the secret, or refused us.
        """
        if welcome.refusal:
            raise AccessDenied(f"{self.protocol}: the peer refused us: {welcome.refusal}")
        wanted = self._derive(b"server proof", challenge, hello.nonce)
        if not hmac.compare_digest(wanted, welcome.proof):
            raise AccessDenied(self._denied("the server"))

    def session_keys(self, challenge: Challenge, hello: ClientHello) -> SessionKeys:
        """Return the keys of a connection whose two ends have proved themselves."""
        return SessionKeys(
            self._derive(b"client frames", challenge, hello.nonce),
            self._derive(b"server frames", challenge, hello.nonce),
        )

    def _derive(self, purpose: bytes, challenge: Challenge, nonce: bytes) -> bytes:
        # Every part has its length before it, so that no two lists of parts make one text.
        parts = [
            purpose,
            self.protocol.encode(),
            challenge.epoch,
            challenge.nonce,
            nonce,
        ]
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self.secret or b"\0", text, hashlib.sha256)

    def _denied(self, who: str) -> str:
        return (
            f"{self.protocol}: {who} does not know this deployment's secret; "
            "give every instance the same one"
        )


def encode(message: msgspec.Struct) -> bytes:
    """Return the message's bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Read a message of one kind.

    Raises:
        PeerLost: the bytes are not one; the connection that they came from is worthless.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the protocol: wanted {kind.__name__}: {exc}") from exc


def decode_address(data: bytes, kind: type[Message], transport: str) -> Message:
    """Read an endpoint's published address.

    Raises:
        TransferError: the bytes are no address of this transport.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise TransferError(f"these {len(data)} bytes are no {transport} address: {exc}") from exc


def _versions(transport: str, ours: int, theirs: int) -> str:
    return (
        f"{transport}: we speak version {ours}, the peer {theirs}; "
        "run one release of mooncake-hal on both"
    )
