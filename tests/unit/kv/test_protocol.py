"""Messages of the side channel: valid ones round-trip, everything else is a BadFrame."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, strategies as st

from mooncake_kv import protocol
from mooncake_kv.errors import HandshakeRefused
from mooncake_kv.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    BadFrame,
    Done,
    Failed,
    FirstToken,
    LeaseReply,
    LeaseStatus,
    PrefillProgress,
    Pushed,
    PushFailed,
    PushOpen,
    Reject,
    Renew,
    Renewed,
    StatusReply,
    StatusRequest,
    Writer,
    check_version,
    decode,
    encode,
)

WRITER = Writer("p1", "p1/a", "10.0.0.7", 5557)
MESSAGES: list[protocol.AnyMessage] = [
    Renew(1, ("a", "b")),
    Renewed(1, ("b",)),
    Done(2, "a", "d1/a"),
    Failed(3, "a", "the client left"),
    LeaseReply(3, LeaseStatus.RELEASED),
    Reject(0, "no"),
    PrefillProgress(4, "a", WRITER, 1, (3, 4), 32, "digest", 30.0, FirstToken(7)),
    PushOpen(4, "a", WRITER),
    Pushed(5, "a", WRITER, ((0, 1, 4096),), FirstToken(7, (-0.5, ((7, -0.5),)), 16)),
    PushFailed(6, "a", WRITER, "broken"),
    StatusRequest(7, ("b",)),
    StatusReply(7, "p1", ("b",), (PushFailed(7, "a", WRITER, "broken"),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_round_trips_through_frame(message: protocol.AnyMessage) -> None:
    assert decode(encode(message)) == message


def test_wire_format_is_stable() -> None:
    payload = encode(Done(7, "cmpl-1", "d1/r"))
    assert msgspec.msgpack.decode(payload) == {
        "kind": "done",
        "ticket": 7,
        "request_id": "cmpl-1",
        "reader": "d1/r",
    }
    assert PROTOCOL_VERSION == 5


def test_empty_frame_is_rejected() -> None:
    with pytest.raises(BadFrame, match="a frame of 0 bytes"):
        decode(b"")


def test_oversized_frame_is_rejected_unread() -> None:
    with pytest.raises(BadFrame, match="a frame of"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@given(frame=st.binary(max_size=200))
def test_random_bytes_are_a_bad_frame(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame)


@given(index=st.integers(0, len(MESSAGES) - 1), data=st.data())
def test_truncated_frame_is_a_bad_frame(index: int, data: st.DataObject) -> None:
    """The session's seal detects altered frames."""
    frame = encode(MESSAGES[index])
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(BadFrame):
        decode(frame[:cut])


DEEP = b"\x83\xa4kind\xa4done\xa6ticket\x01\xa1x" + b"\x91" * 5000 + b"\x01"
NOT_UTF8 = b"\x83\xa4kind\xa4done\xa6ticket\x01\xaarequest_id\xa2\xff\xfe"


@given(payload=st.binary(min_size=1, max_size=200))
@example(payload=DEEP)
@example(payload=NOT_UTF8)
@example(payload=msgspec.msgpack.encode({"kind": "hello", "ticket": 1, "version": 1, "facts": {}}))
@example(payload=msgspec.msgpack.encode({"kind": "shutdown", "ticket": 1}))
@example(
    payload=msgspec.msgpack.encode({"kind": "done", "ticket": "1", "request_id": "a", "reader": ""})
)
@example(payload=encode(Done(1, "a", "d1/a")) + b"tail")
def test_frame_without_a_message_is_a_bad_frame(payload: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(payload)


@given(payload=st.dictionaries(st.text(max_size=10), st.integers() | st.text(max_size=9)))
def test_random_maps_raise_only_bad_frame(payload: dict[str, object]) -> None:
    small = {key: value for key, value in payload.items() if not _is_huge(value)}
    try:
        decode(msgspec.msgpack.encode(small))
    except BadFrame:
        return


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def test_failed_push_warns_peers_of_earlier_releases_by_their_name_for_late_data() -> None:
    """A peer that did not know the name would free blocks that may still change."""
    failed = PushFailed(1, "a", WRITER, "broken", may_still_arrive=True)
    assert msgspec.msgpack.decode(encode(failed))["may_land"] is True
    assert decode(encode(failed)) == failed


def test_other_version_is_rejected_naming_both() -> None:
    check_version(PROTOCOL_VERSION)
    with pytest.raises(HandshakeRefused, match="protocol 2, this instance 5"):
        check_version(2)
