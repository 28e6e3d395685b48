"""Traffic of an engine that keeps KV in a store: repeated prompts, with every token compared."""

import random
import threading
import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt
from support.pool_engine import SETTINGS, ask, engine, forget
from support.pool_traffic import STUCK_S, Tally

from mooncake_kv.config import KVTransferConfig

NUM_PROMPTS = 6
LENGTH = 100
START_S = 300.0


@cache
def model():
    return write_checkpoint(random_model("llama"), Path(mkdtemp(prefix="pool-faults-")))


@cache
def plain_answers():
    """The answer of an engine without the pool to each prompt."""
    with engine(model(), None) as core:
        return [ask(core, [random_prompt(seed, LENGTH)])[0][0] for seed in range(NUM_PROMPTS)]


class EngineTraffic:
    """An engine in a thread of its own. A prompt of which some KV was loaded counts as a hit."""

    def __init__(self, address):
        plain_answers()
        self._stop = threading.Event()
        self._address = address
        self.tally = Tally()
        self.errors = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def await_hits(self, more=3, timeout=START_S):
        """Whether that many more prompts are loaded in time."""
        wanted, deadline = self.tally.hits + more, time.monotonic() + timeout
        while self.tally.hits < wanted and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.tally.hits >= wanted

    def end(self):
        """Stop; return the tally."""
        self._stop.set()
        self._thread.join(2 * STUCK_S)
        self.tally.stuck += self._thread.is_alive()
        if self.errors:
            raise self.errors[0]
        return self.tally

    def _run(self):
        pool = f"connect={self._address.host}:{self._address.port},{SETTINGS}"
        network = KVTransferConfig(secret=self._address.secret.decode())
        try:
            with engine(model(), pool, network=network) as core:
                draw = random.Random(1)
                while not self._stop.is_set():
                    self._ask(core, draw.randrange(NUM_PROMPTS))
        except BaseException as exc:  # thread top: ``end`` raises it
            self.errors.append(exc)

    def _ask(self, core, seed):
        forget(core)
        began, tally = time.monotonic(), self.tally
        (answer,), (num_cached,) = ask(core, [random_prompt(seed, LENGTH)])
        elapsed = time.monotonic() - began
        tally.tries += 1
        tally.wrong += answer != plain_answers()[seed]
        tally.hits += num_cached > 0
        tally.misses += not num_cached
        tally.stuck += elapsed > STUCK_S
        tally.longest_s = max(tally.longest_s, elapsed)
