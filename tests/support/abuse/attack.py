"""An attack: a function that is called with a target and its attempts, in a process of its own.

Its threads and descriptors therefore don't disturb the background traffic, and it can be killed.
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
FORKS.set_forkserver_preload(["support.abuse.catalogue"])  # importing the fuzzers takes seconds


@dataclass(frozen=True, slots=True)
class Target:
    """A running deployment from an attacker's point of view.

    Args:
        proxy: its URL.
        prefills, decodes: URLs of the instances.
        pids: process ids by name.
        topologies: answers of ``/kv/topology``, by URL.
        key: an API key of a client.
        secret: of the deployment; only to check that members can still connect.
        slack: factor on timeouts relative to a quiet machine.
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
        """URLs of all instances."""
        return (*self.prefills, *self.decodes)

    @property
    def headers(self) -> dict[str, str]:
        """Headers with a client's key."""
        return {"authorization": f"Bearer {self.key}"}


class Attempts:
    """Counts an attack's tries, stops it after its time, and collects its complaints.

    Iterating yields the number of each try.
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
        """Remaining seconds."""
        return self._deadline - time.monotonic()

    def note(self, tries: int = 1) -> None:
        """Count further tries."""
        with self._count.get_lock():
            self._count.value += tries

    def complain(self, about: str) -> None:
        """Report a violation, which fails the row."""
        self._num_complaints += 1
        if self._num_complaints <= MAX_COMPLAINTS:
            self._complaints.put(about)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, which becomes a row of the table.

    Args:
        name: in the table and for ``--only``.
        about: description for ``--list``.
        run: the attack's function.
        bounds: limits of its effects on others.
        max_attempts: maximum number of tries.
        at_least_s: seconds that the first tries take.
        connectors: deployments that it applies to; the short run uses the first one.
        is_short: whether it is part of the short run.
        stops: names of processes that it stops; their silence is expected.
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
"""Time by which an attack may exceed its duration before it is killed."""


class Running:
    """A running attack in a process of its own."""

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
        """Whether it has ended; kills it if it is overdue."""
        if self._process.is_alive() and time.monotonic() > self._deadline:
            self._is_late = True
            self.kill()
        return not self._process.is_alive()

    @property
    def tries(self) -> int:
        """Number of tries so far."""
        return int(self._count.value)

    def finish(self) -> tuple[str, ...]:
        """Its complaints, and the reason if it did not end by itself."""
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
        """Kill it and its descendants, and continue the processes that it stopped."""
        with suppress(ValueError):  # it is over and closed
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
    """Main function of the attacker's process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.nice(1)
    attempts = Attempts(seconds, max_attempts, seed, *shared)
    try:
        run(target, attempts)
    except Exception:  # top of a process: reported, and the row fails
        attempts.complain(f"the attack broke: {traceback.format_exc()[-600:]}")
    shared[1].close()
    shared[1].join_thread()
