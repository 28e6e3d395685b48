"""What a publisher of KV events answers to whom asks it for what was, or for all that is held."""

import zmq

from mooncake_conductor.index.kv_event_messages import (
    REPLAY_END,
    EventBatch,
    decode_batch,
    decode_sequence,
)

ANSWER_MS = 60_000
FROM_THE_START = (0).to_bytes(8, "big")


def ask_events(endpoint: str | None, *questions: bytes) -> list[tuple[int, EventBatch]]:
    """The batches of one answer, each with its number.

    Args:
        endpoint: where the publisher is asked.
        questions: the first number that is wanted, 8 bytes, or ``SNAPSHOT_QUESTION``; of several,
            all but one are to be left unanswered.
    """
    found = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.rcvtimeo, asking.linger = ANSWER_MS, 0
        asking.connect(endpoint or "")
        for question in questions:
            asking.send_multipart((b"", question))
        while (frames := asking.recv_multipart())[2] != REPLAY_END:
            found.append((decode_sequence(frames[2]), decode_batch(frames[3])))
    return found
