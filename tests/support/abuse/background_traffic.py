"""The background traffic, which no attack may affect: ordinary requests, health checks, memory."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from support.abuse.attack import Target
from support.abuse.verdicts import Largest
from support.programs import TINY_LLAMA
from support.proxy_fakes_client import NO_TLS, events_of

AT_ONCE = 2
DEADLINE_S = 60.0
PROBE_EVERY_S = 0.25
LATE_S = 10.0
"""Timeout of health checks that are still unanswered when an attack is over."""
NUM_CASES = 12
Json = dict[str, Any]


class Answer(NamedTuple):
    """The compared part of an answer."""

    token_ids: tuple[int, ...]
    text: str


class Case(NamedTuple):
    """An ordinary request and its expected answer."""

    body: Json
    answer: Answer


def ordinary_bodies() -> list[Json]:
    """Prefixes of the page that the tiny model has memorised: greedy, seeded, streamed."""
    page = (TINY_LLAMA / "page.txt").read_text()
    bodies: list[Json] = []
    for number in range(NUM_CASES):
        start = 40 * number
        body: Json = {
            "model": "tiny-llama",
            "prompt": page[start : start + 60 + 30 * number],
            "max_tokens": 12 + number,
            "temperature": 0,
            "return_token_ids": True,
            "stream": number % 2 == 1,
        }
        bodies.append(body)
    return bodies


async def make_cases(target: Target) -> list[Case]:
    """Each request's answers from a single decode instance and the proxy, which must agree.

    Raises:
        AssertionError: they don't, so there is nothing to compare later answers with.
    """
    cases = []
    async with _client(target) as client:
        for body in ordinary_bodies():
            alone = await ask(client, target.decodes[0], body)
            through = await ask(client, target.proxy, body)
            assert alone.token_ids, f"no answer to {body}"
            assert alone == through, f"{body}: {alone} alone, {through} through the proxy"
            cases.append(Case(body, alone))
    return cases


@asynccontextmanager
async def _client(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    # A new connection per request reaches both workers and notices a full backlog.
    limits = httpx.Limits(max_keepalive_connections=0)
    options: Json = {"timeout": DEADLINE_S * target.slack, "limits": limits, "verify": NO_TLS}
    async with httpx.AsyncClient(trust_env=False, headers=target.headers, **options) as client:
        yield client


class Refused(Exception):
    """An ordinary request failed."""


async def ask(client: httpx.AsyncClient, url: str, body: Json) -> Answer:
    """Send a request and read the whole answer.

    Raises:
        Refused: another status than 200, or an error in the stream.
        httpx.HTTPError: the answer is incomplete.
    """
    response = await client.post(f"{url}/v1/completions", json=body)
    if response.status_code != 200:
        raise Refused(f"{response.status_code} {response.text[:200]}")
    if not body["stream"]:
        return _answer(response.json()["choices"])
    events = events_of(response.text)
    if not events or events[-1] != "[DONE]":
        raise Refused(f"the stream ended with {response.text[-200:]!r}")
    return _answer([event["choices"][0] for event in events[:-1] if event.get("choices")])


def _answer(choices: Sequence[Json]) -> Answer:
    token_ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
    return Answer(tuple(token_ids), "".join(choice["text"] for choice in choices))


@dataclass
class BackgroundTraffic:
    """Ordinary traffic and health checks during attacks.

    Args:
        target: the deployment.
        cases: requests and their expected answers.
        stopped: processes whose silence is expected.
    """

    target: Target
    cases: Sequence[Case]
    stopped: tuple[str, ...] = ()
    right: int = 0
    wrong: list[str] = field(default_factory=list)
    unanswered: list[str] = field(default_factory=list)
    silence_s: Largest = field(default_factory=Largest)

    @asynccontextmanager
    async def around(self) -> AsyncIterator[None]:
        """Send requests and health checks until the block ends, then each case once more."""
        ending = asyncio.Event()
        numbers = itertools.count()
        async with _client(self.target) as client:
            tasks = [
                asyncio.create_task(self._traffic(client, numbers, ending)) for _ in range(AT_ONCE)
            ]
            tasks += [
                asyncio.create_task(self._probes(client, name, url, ending))
                for name, url in self.urls().items()
                if name not in self.stopped
            ]
            try:
                yield
            finally:
                ending.set()
                await asyncio.gather(*tasks)
            for case in self.cases:
                await self._one(client, case)

    def urls(self) -> dict[str, str]:
        """URLs of the instances and the proxy, by name."""
        roles = {"prefill": self.target.prefills, "decode": self.target.decodes}
        urls = {f"{role}-{i}": url for role, pool in roles.items() for i, url in enumerate(pool)}
        return urls | {"proxy": self.target.proxy}

    async def _traffic(
        self, client: httpx.AsyncClient, numbers: itertools.count[int], ending: asyncio.Event
    ) -> None:
        while not ending.is_set():
            await self._one(client, self.cases[next(numbers) % len(self.cases)])

    async def _one(self, client: httpx.AsyncClient, case: Case) -> None:
        try:
            answer = await ask(client, self.target.proxy, case.body)
        except (Refused, httpx.HTTPError) as exc:
            self.unanswered.append(f"{type(exc).__name__} {exc}")
            await asyncio.sleep(0.1)  # no tight loop if a server rejects at once
            return
        if answer == case.answer:
            self.right += 1
        else:
            self.wrong.append(f"{case.body['prompt'][:20]!r}: {answer}, not {case.answer}")

    async def _probes(
        self, client: httpx.AsyncClient, name: str, url: str, ending: asyncio.Event
    ) -> None:
        """Send a health check at every interval, even if the previous one is unanswered."""
        in_flight: set[asyncio.Task[None]] = set()
        while not ending.is_set():
            probe = asyncio.create_task(self._probe(client, name, f"{url}/health", ending))
            in_flight.add(probe)
            probe.add_done_callback(in_flight.discard)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ending.wait(), PROBE_EVERY_S)
        await asyncio.gather(*in_flight)

    async def _probe(
        self, client: httpx.AsyncClient, name: str, url: str, ending: asyncio.Event
    ) -> None:
        began = time.monotonic()
        silence = 0.0
        while silence < (LATE_S if ending.is_set() else DEADLINE_S) * self.target.slack:
            with suppress(httpx.HTTPError):
                if (await client.get(url)).status_code == 200:
                    break
            await asyncio.sleep(PROBE_EVERY_S)
            silence = time.monotonic() - began
        self.silence_s = self.silence_s.or_larger(time.monotonic() - began, name)
