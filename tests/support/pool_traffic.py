"""Ordinary traffic of a store: ranks that put and get continuously and compare all bytes."""

import random
import threading
import time
from dataclasses import dataclass

from support.store_process import Rank, WrongBytes

from mooncake_hal.errors import HalError

NUM_CHUNKS = 48
"""Number of different chunks; more than a store's memory holds, so that it evicts all the time."""
BATCH = 4
TRANSFER_TIMEOUT_S = 5.0
STUCK_S = 30.0


@dataclass
class Tally:
    """The results of the operations.

    ``wrong`` hits had other bytes than were put; ``stuck`` operations took longer than STUCK_S.
    """

    tries: int = 0
    hits: int = 0
    misses: int = 0
    puts: int = 0
    wrong: int = 0
    stuck: int = 0
    longest_s: float = 0.0

    def add(self, other):
        self.tries += other.tries
        self.hits += other.hits
        self.misses += other.misses
        self.puts += other.puts
        self.wrong += other.wrong
        self.stuck += other.stuck
        self.longest_s = max(self.longest_s, other.longest_s)


class PoolTraffic:
    """Threads with a rank each; ``transports`` gives their number and their transports."""

    def __init__(self, address, transports=("shm", "shm", "tcp")):
        self._stop = threading.Event()
        self.errors = []
        self._began = {}
        self._tallies = [Tally() for _ in transports]
        self._threads = [
            threading.Thread(target=self._run, args=(number, address, transport), daemon=True)
            for number, transport in enumerate(transports)
        ]
        for thread in self._threads:
            thread.start()

    def hits(self):
        return sum(tally.hits for tally in self._tallies)

    def await_hits(self, more=20, timeout=60.0):
        """Whether the traffic gets that many more hits in time."""
        wanted, deadline = self.hits() + more, time.monotonic() + timeout
        while self.hits() < wanted and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.hits() >= wanted

    def end(self):
        """Stop; return the tally."""
        self._stop.set()
        for thread in self._threads:
            thread.join(STUCK_S)
        total = Tally(stuck=sum(thread.is_alive() for thread in self._threads))
        for tally in self._tallies:
            total.add(tally)
        if self.errors:
            raise self.errors[0]
        return total

    def _run(self, number, address, transport):
        draw, tally = random.Random(number), self._tallies[number]
        try:
            rank = Rank(address, transport)
            try:
                while not self._stop.is_set():
                    self._operate(rank, draw, tally)
            finally:
                rank.close()
        except BaseException as exc:  # thread top: ``end`` raises it
            self.errors.append(exc)

    def _operate(self, rank, draw, tally):
        numbers = draw.sample(range(NUM_CHUNKS), BATCH)
        began = time.monotonic()
        tally.tries += 1
        try:
            if draw.random() < 0.4:
                tally.puts += sum(rank.put(numbers, timeout=TRANSFER_TIMEOUT_S))
            else:
                hits = rank.get(numbers, timeout=TRANSFER_TIMEOUT_S)
                tally.hits += sum(hits)
                tally.misses += len(hits) - sum(hits)
                if not any(hits):
                    self._stop.wait(0.01)  # about as long as computing them would take
        except WrongBytes:
            tally.wrong += 1
        except HalError:  # the store went away in the middle: a miss
            tally.misses += BATCH
        elapsed = time.monotonic() - began
        tally.longest_s = max(tally.longest_s, elapsed)
        tally.stuck += elapsed > STUCK_S
