"""Authentication: only holders of the secret pass, and recorded messages cannot be replayed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, strategies as st

from mooncake_hal.errors import AccessDenied, PeerLost, TransferError, VersionMismatch
from mooncake_hal.session.authentication import (
    Challenge,
    ClientHello,
    Credentials,
    ServerWelcome,
    decode,
    decode_address,
    encode,
    fresh_epoch,
    secret_digests,
    split_secrets,
)
from mooncake_hal.transports.tcp.tcp_sockets import TcpAddress

OURS = Credentials(b"a secret", "tcp", 1)
EPOCH = fresh_epoch()


def test_both_sides_of_one_deployment_agree() -> None:
    challenge = OURS.challenge(EPOCH)
    hello = OURS.respond(challenge, EPOCH)
    OURS.check_server(challenge, hello, OURS.check_client(challenge, hello))


@pytest.mark.parametrize(
    "other",
    [replace(OURS, secret=b"another"), replace(OURS, secret=b""), replace(OURS, protocol="shm")],
)
def test_other_deployment_is_denied_on_both_sides(other: Credentials) -> None:
    challenge = OURS.challenge(EPOCH)
    with pytest.raises(AccessDenied, match="does not know this deployment's secret"):
        OURS.check_client(challenge, other.respond(challenge, EPOCH))
    hello = OURS.respond(challenge, EPOCH)
    proof = other._derive(other.secret, b"server proof", challenge, hello.nonce)
    forged = ServerWelcome(proof=proof)
    with pytest.raises(AccessDenied, match="the server does not know"):
        OURS.check_server(challenge, hello, forged)


OLD, NEW = b"the secret of last year", b"the secret of this year"
BOTH = OLD + b"\n" + NEW
NEW_FIRST = NEW + b"\n" + OLD


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (OLD, BOTH),
        (BOTH, OLD),
        (BOTH, NEW_FIRST),
        (NEW_FIRST, BOTH),
        (NEW_FIRST, NEW),
        (NEW, NEW_FIRST),
    ],
)
def test_deployment_can_go_over_to_another_secret(client: bytes, server: bytes) -> None:
    """Instance by instance: old, both with the old one first, both with the new one first, new."""
    ours, theirs = replace(OURS, secret=client), replace(OURS, secret=server)
    challenge = theirs.challenge(EPOCH)
    hello = ours.respond(challenge, EPOCH)
    ours.check_server(challenge, hello, theirs.check_client(challenge, hello))
    assert ours.session_keys(challenge, hello) == theirs.session_keys(challenge, hello)


def test_only_the_first_secret_proves() -> None:
    challenge = OURS.challenge(EPOCH)
    hello = replace(OURS, secret=BOTH).respond(challenge, EPOCH)
    with pytest.raises(AccessDenied):
        replace(OURS, secret=NEW).check_client(challenge, hello)


@pytest.mark.parametrize("secret", [b"", b"\n", b"random \n bytes of one secret", b"\n" + OLD])
def test_bytes_with_a_line_that_could_be_guessed_are_one_secret(secret: bytes) -> None:
    assert split_secrets(secret) == (secret,)


def test_published_digests_are_those_of_each_secret_and_short() -> None:
    """Four digits rule out no more than 65,535 of 65,536 guesses of a weak secret."""
    old, new = secret_digests(BOTH)
    assert secret_digests(OLD) == (old,)
    assert secret_digests(NEW_FIRST) == (new, old)
    assert old != new
    assert len(old) == 4
    assert secret_digests(b"") == ("none",)


def test_recorded_hello_cannot_be_replayed() -> None:
    first, second = OURS.challenge(EPOCH), OURS.challenge(EPOCH)
    hello = OURS.respond(first, EPOCH)
    with pytest.raises(AccessDenied):
        OURS.check_client(second, hello)


def test_reflected_client_proof_is_denied() -> None:
    challenge = OURS.challenge(EPOCH)
    hello = OURS.respond(challenge, EPOCH)
    with pytest.raises(AccessDenied):
        OURS.check_server(challenge, hello, ServerWelcome(proof=hello.proof))


def test_an_empty_proof_or_nonce_is_denied() -> None:
    challenge = OURS.challenge(EPOCH)
    for hello in (
        ClientHello(1, b"", b""),
        ClientHello(1, b"x" * 32, b""),
        ClientHello(1, b"", b"y" * 32),
    ):
        with pytest.raises(AccessDenied):
            OURS.check_client(challenge, hello)


def test_other_epoch_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match="has restarted"):
        OURS.respond(OURS.challenge(fresh_epoch()), EPOCH)


def test_version_mismatch_is_named_on_both_sides() -> None:
    newer = replace(OURS, version=2)
    with pytest.raises(VersionMismatch, match="we speak version 1, the peer 2"):
        OURS.respond(newer.challenge(EPOCH), EPOCH)
    challenge = OURS.challenge(EPOCH)
    hello = msgspec.structs.replace(OURS.respond(challenge, EPOCH), version=2)
    with pytest.raises(VersionMismatch, match="we speak version 1, the peer 2"):
        OURS.check_client(challenge, hello)


def test_server_refusal_is_reported() -> None:
    challenge = OURS.challenge(EPOCH)
    hello = OURS.respond(challenge, EPOCH)
    with pytest.raises(AccessDenied, match="rejected us: because"):
        OURS.check_server(challenge, hello, ServerWelcome(refusal="because"))


@given(st.binary(max_size=200))
def test_garbage_is_a_typed_error(data: bytes) -> None:
    for kind in (Challenge, ClientHello):
        with pytest.raises(PeerLost, match="broke the protocol"):
            decode(data, kind)
    with pytest.raises(TransferError, match="not a tcp address"):
        decode_address(data, TcpAddress, "tcp")
    challenge = OURS.challenge(EPOCH)
    with pytest.raises((PeerLost, AccessDenied)):
        OURS.check_server(challenge, OURS.respond(challenge, EPOCH), decode(data, ServerWelcome))


def test_messages_round_trip() -> None:
    challenge = OURS.challenge(EPOCH)
    assert decode(encode(challenge), Challenge) == challenge
