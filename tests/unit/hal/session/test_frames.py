"""Frames: reassembled from any fragments, bounded, and sealed against tampering in transit."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mooncake_hal.errors import PeerLost
from mooncake_hal.session.authentication import Proven, SessionKeys
from mooncake_hal.session.frames import (
    LENGTH_BYTES,
    AnyMessage,
    FrameReader,
    Ping,
    Seal,
    Seals,
    SessionRequest,
    frame,
)

PROVEN = Proven(b"epoch", SessionKeys(b"c" * 32, b"s" * 32))


def sealed(*messages: AnyMessage) -> list[bytes]:
    """Return the sealed bodies of messages from a client."""
    seals = Seals.of_client(PROVEN)
    return [seals.outgoing.seal(message)[LENGTH_BYTES:] for message in messages]


def opener() -> Seal:
    """Return the seal that opens them at the server."""
    return Seals.of_server(PROVEN).incoming


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_frames_are_reassembled_from_any_fragments(
    bodies: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(frame(body) for body in bodies)
    reader, found = FrameReader(64), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        reader.feed(stream[:size])
        stream = stream[size:]
        while (body := reader.take()) is not None:
            found.append(body)
    assert found == bodies


def test_oversized_frame_is_rejected_by_its_length_alone() -> None:
    reader = FrameReader(4096)
    reader.feed((4097).to_bytes(4, "big"))
    with pytest.raises(PeerLost, match="a frame of 4097 bytes exceeds 4096"):
        reader.take()


def test_messages_arrive_in_order() -> None:
    messages = [Ping(1), SessionRequest(2, b"x"), Ping(3)]
    incoming = opener()
    assert [incoming.open(body) for body in sealed(*messages)] == messages


@pytest.mark.parametrize(
    "attack",
    [
        lambda a, b: [a, a],
        lambda a, b: [b],
        lambda a, b: [a[:-1] + bytes([a[-1] ^ 1])],
        lambda a, b: [bytes([a[0] ^ 1]) + a[1:]],
        lambda a, b: [a[:10]],
        lambda a, b: [b""],
    ],
    ids=["replayed", "dropped or reordered", "changed", "resealed", "truncated", "empty"],
)
def test_frame_that_is_not_the_next_one_is_rejected(attack: object) -> None:
    bodies = attack(*sealed(Ping(1), Ping(2)))  # type: ignore[operator]  # a lambda
    incoming = opener()
    for body in bodies[:-1]:
        incoming.open(body)
    with pytest.raises(PeerLost, match="seal does not match"):
        incoming.open(bodies[-1])


def test_reflected_frame_is_rejected() -> None:
    ours = Seals.of_client(PROVEN)
    with pytest.raises(PeerLost, match="seal does not match"):
        ours.incoming.open(ours.outgoing.seal(Ping(1))[LENGTH_BYTES:])


def test_sealed_body_that_is_no_message_is_rejected() -> None:
    key = PROVEN.keys.client
    data = b"\x93\x01\x02\x03"
    seal = Seal(key)
    body = seal._mac(data) + data
    with pytest.raises(PeerLost, match="broke the session's protocol"):
        opener().open(body)
