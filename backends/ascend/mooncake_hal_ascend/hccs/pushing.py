"""Writes by whole runs into buffers that the peer lends, and spreads: see ``runs``.

While the peer spreads one of the two, the engine fills the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

from mooncake_hal.errors import PeerLost, TransferError
from mooncake_hal.transport import Spans
from mooncake_hal.transports.adapter.facts import decode_told
from mooncake_hal.transports.control.session import Session
from mooncake_hal.transports.handshake import encode
from mooncake_hal_ascend.hccs.messages import SLOTS, Borrow, Lent, Spread
from mooncake_hal_ascend.hccs.runs import BUFFER_BYTES, Batch, Runs, find_runs
from mooncake_hal_ascend.hccs.settings import NAME

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""How often it is looked whether anybody still waits for the transfer."""
GRACE_SECONDS = 2.0
"""How long a peer may then take to answer until it counts as lost."""


class Pusher:
    """What one peer has lent us.

    Args:
        session: the control connection to it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._address: int | None = None
        self._is_refused = False

    def write(
        self,
        spans: Spans,
        base: int,
        write: Callable[[Spans], None],
        must_stop: Callable[[], bool],
    ) -> bool:
        """Write, if that is better done so; all is at its place when this returns.

        However it ends, the peer spreads nothing of it after that. One that does not say so in
        time, being stopped, say, is given up with its connection: it may still spread what it had
        been asked for when it goes on.

        Args:
            spans: pieces that go to one region of the peer's.
            base: that region's first byte.
            write: writes by the engine; returns when all has arrived.
            must_stop: says when nobody waits for it any more.

        Returns:
            Whether it was done so.

        Raises:
            TransferError: not all of it has arrived.
        """
        runs = find_runs(spans.local, spans.remote, spans.nbytes, base, BUFFER_BYTES)
        if runs is None or not self._borrowed(must_stop):
            return False
        answers: list[Future[bytes]] = []
        try:
            self._write_runs(runs, write, answers, must_stop)
        finally:
            self._await(answers, must_stop)
        for answer in answers:
            answer.result()
        return True

    def _write_runs(
        self,
        runs: Runs,
        write: Callable[[Spans], None],
        answers: list[Future[bytes]],  # that buffers are spread, in turns
        must_stop: Callable[[], bool],
    ) -> None:
        assert self._address is not None
        for number, batch in enumerate(runs.batches(BUFFER_BYTES)):
            slot = number % SLOTS
            if number >= SLOTS:
                is_spread = answers[number - SLOTS]
                self._await([is_spread], must_stop)
                is_spread.result()
            write(_onto(self._address + slot * BUFFER_BYTES, batch))
            call = Spread(slot, batch.places.tobytes(), batch.sizes.tobytes())
            answers.append(self._session.ask(encode(call)))

    def _borrowed(self, must_stop: Callable[[], bool]) -> bool:
        """Whether the peer lends buffers; asked once, as it says the same until a peer leaves."""
        if self._address is None and not self._is_refused:
            answer = self._session.ask(encode(Borrow()))
            self._await([answer], must_stop)
            try:
                self._address = decode_told(answer.result(), Lent).address
            except PeerLost:
                raise
            except TransferError as exc:
                self._is_refused = True
                logger.warning("%s: many small pieces are written one by one: %s", NAME, exc)
        return self._address is not None

    def _await(self, answers: Iterable[Future[bytes]], must_stop: Callable[[], bool]) -> None:
        """Wait until the peer has answered, or is lost."""
        missing, given_up = set(answers), float("inf")
        while missing:
            missing = wait(missing, LOOK_SECONDS).not_done
            if must_stop() and given_up == float("inf"):
                given_up = time.monotonic() + GRACE_SECONDS
            if time.monotonic() >= given_up:
                self._session.hang_up()  # its end is the answer that is missing


def _onto(address: int, batch: Batch) -> Spans:
    return Spans(batch.starts, batch.in_buffer(address), batch.run_bytes)
