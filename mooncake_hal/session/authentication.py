"""The handshake by which the two ends of a session prove that they belong to one deployment. Pure.

The server sends a challenge; the client replies with a challenge of its own and its proof; the
server checks the proof before it processes anything else, and replies with its own proof. Proofs
and the keys that seal the later frames are HMAC-SHA256 under the shared secret over a purpose, the
protocol, the server's epoch and both challenges. So a proof can be neither replayed nor reflected,
and no key is used for two purposes or two connections.

Each side is a generator without I/O, which both blocking sockets and asyncio drive.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import msgspec

from mooncake_hal.errors import AccessDenied, PeerLost, TransferError, VersionMismatch
from mooncake_hal.options import MIN_SECRET_BYTES

NONCE_BYTES = 32
EPOCH_BYTES = 16

DIGEST_BYTES = 2
DIGEST_ROUNDS = 200_000
"""Length and cost of a published digest. The network may read it, so it must not tell whether a
guess of a weak secret is right: one in 65,536 wrong guesses has the same digest, and each takes a
tenth of a second. Two deployments with the same digest are told apart by the handshake."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)
"""The exceptions that msgspec raises for bytes that are not the expected message."""

Message = TypeVar("Message", bound=msgspec.Struct)


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """Server to client, the first message: the server's epoch and its challenge."""

    version: int
    epoch: bytes
    nonce: bytes


class ClientHello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """Client to server: its own challenge, and its proof."""

    version: int
    nonce: bytes
    proof: bytes


class ServerWelcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """Server to client, the last message: the server's proof, or why it rejects the client."""

    proof: bytes = b""
    refusal: str = ""


class SessionKeys(NamedTuple):
    """The keys that seal a connection's frames, one for each sending side."""

    client: bytes
    server: bytes


class HandshakeStep(NamedTuple):
    """The next step of one side: send ``message``, unless it is empty, then await a reply if
    ``awaits_reply``."""

    message: bytes
    awaits_reply: bool


class Proven(NamedTuple):
    """The result of a successful handshake: the server's epoch and the session keys."""

    epoch: bytes
    keys: SessionKeys


Handshake = Generator[HandshakeStep, bytes, Proven]
"""One side of the handshake: a generator that yields steps, is sent the peer's replies, and returns
``Proven`` or raises a TransferError."""


def fresh_nonce() -> bytes:
    """Return random bytes to challenge a peer with."""
    return secrets.token_bytes(NONCE_BYTES)


def fresh_epoch() -> bytes:
    """Return a random identity for an endpoint; a restarted endpoint gets another one."""
    return secrets.token_bytes(EPOCH_BYTES)


def split_secrets(secret: bytes) -> tuple[bytes, ...]:
    """Return the secrets that ``secret`` holds, one per line, so that a deployment can go over to
    another one: instances are given both, old first, then new first, then the new one alone.

    Bytes with a line of fewer than MIN_SECRET_BYTES are one secret: random ones may hold line
    ends, and a part of them could be guessed.
    """
    lines = secret.split(b"\n")
    return (secret,) if min(map(len, lines)) < MIN_SECRET_BYTES else tuple(lines)


@lru_cache(maxsize=8)
def secret_digests(secret: bytes) -> tuple[str, ...]:
    """Return a short digest of each secret, in order, to be published: two ends whose first ones
    are not among the other's can't connect. "none" if there is no secret."""
    if not secret:
        return ("none",)
    return tuple(
        hashlib.pbkdf2_hmac(
            "sha256", each, b"mooncake-hal published digest", DIGEST_ROUNDS, DIGEST_BYTES
        ).hex()
        for each in split_secrets(secret)
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a session, which must be the same on both ends.

    Args:
        secret: the deployment's shared secret, or several: see ``split_secrets``. The first one
            proves who we are, and a peer may prove itself with any of them.
        protocol: name of the protocol, such as a transport's name.
        version: version of that protocol.
    """

    secret: bytes
    protocol: str
    version: int

    def accept(self, epoch: bytes, refusal: str = "") -> Handshake:
        """Run the server's side: challenge the client, check its proof, send our own.

        A rejected client is sent the reason before the error is raised.

        Args:
            epoch: this endpoint's epoch.
            refusal: why this client is rejected regardless of its proof; empty if it is not.

        Raises:
            VersionMismatch, AccessDenied: see ``check_client``.
            PeerLost: the client's message is no ClientHello.
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
            epoch: the required epoch of the server; None accepts any.

        Raises:
            VersionMismatch, PeerLost, AccessDenied: see ``respond`` and ``check_server``.
        """
        challenge = decode((yield HandshakeStep(b"", True)), Challenge)
        hello = self.respond(challenge, challenge.epoch if epoch is None else epoch)
        welcome = decode((yield HandshakeStep(encode(hello), True)), ServerWelcome)
        self.check_server(challenge, hello, welcome)
        return Proven(challenge.epoch, self.session_keys(challenge, hello))

    def challenge(self, epoch: bytes) -> Challenge:
        """Server: create the challenge."""
        return Challenge(self.version, epoch, fresh_nonce())

    def respond(self, challenge: Challenge, epoch: bytes) -> ClientHello:
        """Client: check the challenge against the required epoch; return our proof.

        Raises:
            VersionMismatch: the server uses another version of the protocol.
            PeerLost: the server's epoch is not the required one: it has restarted.
        """
        if challenge.version != self.version:
            raise VersionMismatch(_versions(self.protocol, self.version, challenge.version))
        if challenge.epoch != epoch:
            raise PeerLost(
                f"{self.protocol}: the peer at this address has restarted (another epoch); "
                "get its new address"
            )
        nonce, first = fresh_nonce(), split_secrets(self.secret)[0]
        proof = self._derive(first, b"client proof", challenge, nonce)
        return ClientHello(self.version, nonce, proof)

    def check_client(self, challenge: Challenge, hello: ClientHello) -> ServerWelcome:
        """Server: check the client's proof; return our own.

        Raises:
            VersionMismatch: the client uses another version of the protocol.
            AccessDenied: the client knows none of our secrets.
        """
        if hello.version != self.version:
            raise VersionMismatch(_versions(self.protocol, self.version, hello.version))
        secret = self._proven_secret(challenge, hello)
        if len(hello.nonce) != NONCE_BYTES or secret is None:
            raise AccessDenied(self._denied("the client"))
        return ServerWelcome(proof=self._derive(secret, b"server proof", challenge, hello.nonce))

    def check_server(
        self, challenge: Challenge, hello: ClientHello, welcome: ServerWelcome
    ) -> None:
        """Client: check the server's proof.

        Raises:
            AccessDenied: the server does not know the secret, or it rejected us.
        """
        if welcome.refusal:
            raise AccessDenied(f"{self.protocol}: the peer rejected us: {welcome.refusal}")
        first = split_secrets(self.secret)[0]
        wanted = self._derive(first, b"server proof", challenge, hello.nonce)
        if not hmac.compare_digest(wanted, welcome.proof):
            raise AccessDenied(self._denied("the server"))

    def session_keys(self, challenge: Challenge, hello: ClientHello) -> SessionKeys:
        """Return the session keys of a connection whose two ends have proved themselves."""
        secret = self._proven_secret(challenge, hello)
        assert secret is not None, "the client has proved itself"
        return SessionKeys(
            self._derive(secret, b"client frames", challenge, hello.nonce),
            self._derive(secret, b"server frames", challenge, hello.nonce),
        )

    def _proven_secret(self, challenge: Challenge, hello: ClientHello) -> bytes | None:
        """Return the one of our secrets that the client has proved to know, if any."""
        for secret in split_secrets(self.secret):
            wanted = self._derive(secret, b"client proof", challenge, hello.nonce)
            if hmac.compare_digest(wanted, hello.proof):
                return secret
        return None

    def _derive(self, secret: bytes, purpose: bytes, challenge: Challenge, nonce: bytes) -> bytes:
        # Every part is prefixed with its length, so that no two lists of parts give the same text.
        parts = [
            purpose,
            self.protocol.encode(),
            challenge.epoch,
            challenge.nonce,
            nonce,
        ]
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(secret or b"\0", text, hashlib.sha256)

    def _denied(self, who: str) -> str:
        return (
            f"{self.protocol}: {who} does not know this deployment's secret; "
            "give every instance the same one"
        )


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Decode a message of the given type.

    Raises:
        PeerLost: the bytes are no such message; the connection must not be used any more.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise PeerLost(f"the peer broke the protocol: wanted {kind.__name__}: {exc}") from exc


def decode_address(data: bytes, kind: type[Message], transport: str) -> Message:
    """Decode an endpoint's published address.

    Raises:
        TransferError: the bytes are no address of this transport.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNREADABLE as exc:
        raise TransferError(f"{len(data)} bytes are not a {transport} address: {exc}") from exc


def _versions(transport: str, ours: int, theirs: int) -> str:
    return (
        f"{transport}: we speak version {ours}, the peer {theirs}; "
        "run one release of mooncake-hal on both"
    )
