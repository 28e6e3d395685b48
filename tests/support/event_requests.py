"""Requests a replay or a snapshot from a publisher of KV events."""

import zmq

from mooncake_conductor.index.kv_event_messages import (
    REPLAY_END,
    EventBatch,
    decode_batch,
    decode_sequence,
)

ANSWER_MS = 60_000
FROM_THE_START = (0).to_bytes(8, "big")


def request_events(endpoint: str | None, *requests: bytes) -> list[tuple[int, EventBatch]]:
    """Send requests to a publisher; return the batches of one answer with their sequence numbers.

    Args:
        endpoint: the publisher's address for replay requests.
        requests: the first wanted sequence number in 8 bytes, or ``SNAPSHOT_REQUEST``.
            Of several requests, the publisher must ignore all but one.
    """
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.rcvtimeo, sock.linger = ANSWER_MS, 0
        sock.connect(endpoint or "")
        for request in requests:
            sock.send_multipart((b"", request))
        while (frames := sock.recv_multipart())[2] != REPLAY_END:
            found.append((decode_sequence(frames[2]), decode_batch(frames[3])))
    return found
