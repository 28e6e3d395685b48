"""An attack: a function that is given a target and an allowance, and runs in a process of its own.

So neither its threads nor its descriptors disturb those who watch the target, and it can be ended.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from support.abuse.verdicts import Bounds
from support.programs import descendants

MAX_COMPLAINTS = 20
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["support.abuse.catalogue"])  # fuzzers take seconds to import


@dataclass(frozen=True, slots=True)
class Target:
    """A running deployment, as its attackers know it.

    Args:
        proxy: its URL.
        prefills, decodes: URLs of the instances.
        pids: process ids by name.
        topologies: what ``/kv/topology`` says, by URL.
        key: of a client.
        secret: of the deployment; only to see that members still get in.
        slack: how much longer things may take than on a quiet machine.
    """

    proxy: str
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    pids: dict[str, int]
    topologies: dict[str, Any]
    key: str
    secret: bytes
    slack: float = 1.0

    @property
    def instances(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.prefills, *self.decodes)

    @property
    def headers(self) -> dict[str, str]:
        """Of a client."""
        return {"authorization": f"Bearer {self.key}"}


class Attempts:
    """Counts an attack's tries, ends it after its time, and takes its complaints.

    Iterating gives the number of each try.
    """

    def __init__(
        self, seconds: float, max_attempts: int, seed: int, count: Any, complaints: Any
    ) -> None:
        self.numbers = random.Random(seed)
        self.seed = seed
        self._deadline = time.monotonic() + seconds
        self._max_attempts = max_attempts
        self._count = count
        self._complaints = complaints
        self._num_complaints = 0

    def __iter__(self) -> Iterator[int]:
        number = 0
        while not self.is_over and number < self._max_attempts:
            yield number
            self.note()
            number += 1

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.left_s <= 0

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def note(self, tries: int = 1) -> None:
        """So many more tries."""
        with self._count.get_lock():
            self._count.value += tries

    def complain(self, about: str) -> None:
        """Something that may not be, and fails the row."""
        self._num_complaints += 1
        if self._num_complaints <= MAX_COMPLAINTS:
            self._complaints.put(about)


@dataclass(frozen=True, slots=True)
class Attack:
    """A row to be.

    Args:
        name: in the table and for ``--only``.
        about: what it does, for ``--list``.
        run: does it.
        bounds: what it may do to others.
        max_attempts: tries.
        at_least_s: what it needs before the first try counts, and a few more.
        connectors: which deployments it is for; the first one in the short form.
        is_short: a part of the short form.
        stops: names of processes that it stops, whose silence is no news.
    """

    name: str
    about: str
    run: Callable[[Target, Attempts], None]
    bounds: Bounds = field(default_factory=Bounds)
    max_attempts: int = 100_000
    at_least_s: float = 0.0
    connectors: tuple[str, ...] = ("pull",)
    is_short: bool = True
    stops: tuple[str, ...] = ()


GRACE_S = 30.0
"""An attack that takes no notice of the end of its time gets so much more, then it is killed."""


class Running:
    """An attack under way, in a process of its own."""

    def __init__(self, attack: Attack, target: Target, seconds: float, seed: int) -> None:
        self.attack = attack
        self._target = target
        seconds = max(seconds, attack.at_least_s * target.slack)
        self._count = FORKS.Value("q", 0)
        self._complaints = FORKS.Queue()
        self._limit_s = seconds + GRACE_S * target.slack
        self._deadline = time.monotonic() + self._limit_s
        self._is_late = False
        arguments = (attack.run, target, seconds, attack.max_attempts, seed)
        self._process: BaseProcess = FORKS.Process(
            target=_perform, args=(*arguments, self._count, self._complaints)
        )
        self._process.start()

    @property
    def is_over(self) -> bool:
        """Whether it has ended; one that is late is killed."""
        if self._process.is_alive() and time.monotonic() > self._deadline:
            self._is_late = True
            self.kill()
        return not self._process.is_alive()

    @property
    def tries(self) -> int:
        """So far."""
        return int(self._count.value)

    def finish(self) -> tuple[str, ...]:
        """Its complaints, and why it ended if not by itself."""
        self._process.join()
        found = []
        while not self._complaints.empty():
            found.append(self._complaints.get())
        if self._is_late:
            found.append(f"the attack was not over after {self._limit_s:.0f} s, and was killed")
        elif self._process.exitcode:
            found.append(f"the attack ended with status {self._process.exitcode}")
        self._process.close()
        return tuple(found)

    def kill(self) -> None:
        """At once, with what it started; what it stopped goes on."""
        with suppress(ValueError):  # it is over, and closed
            for pid in (*descendants(self._process.pid or 0), self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid or 0, signal.SIGKILL)
            self._process.join()
            for name in self.attack.stops:
                os.kill(self._target.pids[name], signal.SIGCONT)


def _perform(
    run: Callable[[Target, Attempts], None],
    target: Target,
    seconds: float,
    max_attempts: int,
    seed: int,
    *shared: Any,
) -> None:
    """Top of the attacker's process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(1)
    attempts = Attempts(seconds, max_attempts, seed, *shared)
    try:
        run(target, attempts)
    except Exception:  # the top of a process: reported, and the row fails
        attempts.complain(f"the attack broke: {traceback.format_exc()[-600:]}")
    shared[1].close()
    shared[1].join_thread()
