"""How two endpoints prove to each other that they belong to one deployment. Pure.

The server sends a challenge; the client answers with one of its own and a proof; the server checks
it before it believes anything else, then proves itself in turn. A proof is an HMAC-SHA256 under
the shared secret over both challenges, the transport, the server's epoch and the prover's role, so
that it can neither be replayed nor reflected.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from mooncake_hal.errors import AccessDenied, PeerLost, TransferError, VersionMismatch

NONCE_BYTES = 32
EPOCH_BYTES = 16

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""What msgspec raises for bytes that are not the message that was wanted."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """Server to client, first: which incarnation this is, and what to prove."""

    version: int
    epoch: bytes
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Client to server: its own challenge, and its proof.

    Args:
        lane: which of the peer's connections this is.
        peer: random identity of the client's Peer object, the same on all its connections.
    """

    version: int
    nonce: bytes
    proof: bytes
    peer: bytes = b""
    lane: int = 0


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Server to client, last: the server's proof, or why there is none."""

    proof: bytes = b""
    refusal: str = ""


def fresh_nonce() -> bytes:
    """Return random bytes to challenge somebody with."""
    return secrets.token_bytes(NONCE_BYTES)


def fresh_epoch() -> bytes:
    """Return a random identity of an endpoint; a restarted one never has it again."""
    return secrets.token_bytes(EPOCH_BYTES)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What both ends of a transport have to agree on.

    Args:
        secret: the deployment's shared secret.
        transport: name of the transport.
        version: version of the transport's protocol.
    """

    secret: bytes
    transport: str
    version: int

    def challenge(self, epoch: bytes) -> Challenge:
        """Server: begin."""
        return Challenge(self.version, epoch, fresh_nonce())

    def answer(self, challenge: Challenge, epoch: bytes, peer: bytes = b"", lane: int = 0) -> Hello:
        """Client: check the challenge against the wanted epoch, and prove.

        Raises:
            VersionMismatch: the server speaks another version.
            PeerLost: the server is another incarnation than the one whose address we have.
        """
        if challenge.version != self.version:
            raise VersionMismatch(_versions(self.transport, self.version, challenge.version))
        if challenge.epoch != epoch:
            raise PeerLost(
                f"{self.transport}: another incarnation answers at the peer's address; "
                "get its new address"
            )
        nonce = fresh_nonce()
        proof = self._proof(b"client", challenge, nonce)
        return Hello(self.version, nonce, proof, peer, lane)

    def check_client(self, challenge: Challenge, hello: Hello) -> Welcome:
        """Server: check the client's proof; return ours.

        Raises:
            VersionMismatch: the client speaks another version.
            AccessDenied: it does not know the secret.
        """
        if hello.version != self.version:
            raise VersionMismatch(_versions(self.transport, self.version, hello.version))
        wanted = self._proof(b"client", challenge, hello.nonce)
        if len(hello.nonce) != NONCE_BYTES or not hmac.compare_digest(wanted, hello.proof):
            raise AccessDenied(self._denied("the client"))
        return Welcome(proof=self._proof(b"server", challenge, hello.nonce))

    def check_server(self, challenge: Challenge, hello: Hello, welcome: Welcome) -> None:
        """Client: check the server's proof.

        Raises:
            AccessDenied: it does not know the secret, or refused us.
        """
        if welcome.refusal:
            raise AccessDenied(f"{self.transport}: the peer refused us: {welcome.refusal}")
        wanted = self._proof(b"server", challenge, hello.nonce)
        if not hmac.compare_digest(wanted, welcome.proof):
            raise AccessDenied(self._denied("the server"))

    def _proof(self, role: bytes, challenge: Challenge, nonce: bytes) -> bytes:
        parts = [role, self.transport.encode(), challenge.epoch, challenge.nonce, nonce]
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self.secret or b"\0", text, hashlib.sha256).digest()

    def _denied(self, who: str) -> str:
        return (
            f"{self.transport}: {who} does not know this deployment's secret; "
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
