"""Attacks by established fuzzers: raw bytes from hypothesis, requests from schemathesis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from hypothesis.errors import HypothesisWarning, Unsatisfiable
from schemathesis import GenerationMode
from support.abuse.attack import Attack, Attempts, Target
from support.abuse.connections import http_ports
from support.abuse.peer_ports import peer_ports
from support.abuse.verdicts import Bounds
from support.abuse.wire import ENDED, connection, read_all

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = 30
"""Consecutive examples before the next target's turn."""
ANSWER_S = 0.05
CASE_S = 30.0
SERVED_BY_PROXY = ("/v1/", "/tokenize", "/detokenize", "/health", "/metrics")
ALLOWED_5XX = frozenset({501, 503, 504})
"""Allowed errors: not implemented, overloaded, and past the request's own timeout."""


def read_corpus(name: str) -> list[bytes]:
    """A file's lines, which are written as Python bytes literals."""
    lines = (CORPUS / f"{name}.txt").read_text().splitlines()
    return [
        line.encode("latin-1").decode("unicode_escape").encode("latin-1")
        for line in lines
        if not line.startswith("#")
    ]


def mutations(corpus: list[bytes]) -> st.SearchStrategy[bytes]:
    """Corpus entries, recombined pieces of them, and noise in between."""
    entry = st.sampled_from(corpus)
    piece = st.tuples(entry, st.integers(0, 200), st.integers(1, 200)).map(
        lambda drawn: drawn[0][drawn[1] : drawn[1] + drawn[2]]
    )
    noise = st.binary(max_size=64)
    joined = st.lists(st.one_of(entry, piece, noise), min_size=1, max_size=6).map(b"".join)
    repeated = st.tuples(piece, st.integers(1, 500)).map(lambda drawn: drawn[0] * drawn[1])
    return st.one_of(entry, joined, repeated)


def fuzz(
    attempts: Attempts, strategy: st.SearchStrategy[bytes], send: Callable[[int, bytes], None]
) -> None:
    """Generate and send data until the time is up."""
    rounds = 0

    def once(data: bytes) -> None:
        if not attempts.is_over:
            send(rounds, data)
            attempts.note()

    while not attempts.is_over:
        draw = given(strategy)(once)
        _examples(attempts, rounds)(draw)()
        rounds += 1


def _examples(
    attempts: Attempts, rounds: int
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        bounded = settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        seeded: Callable[[], None] = seed(attempts.seed + rounds)(bounded(test))
        return seeded

    return decorate


def raw_http(target: Target, attempts: Attempts) -> None:
    """Random bytes sent to the HTTP parsers."""
    ports = http_ports(target)

    def send(rounds: int, data: bytes) -> None:
        with suppress(*ENDED), connection(ports[rounds % len(ports)]) as sock:
            sock.sendall(data)
            answer = read_all(sock, ANSWER_S)
            if answer and not answer.startswith(b"HTTP/1."):
                attempts.complain(f"{data[:80]!r} got {answer[:40]!r}")
            if answer.startswith(b"HTTP/1.1 500"):
                attempts.complain(f"500 for {data[:200]!r}")

    fuzz(attempts, mutations(read_corpus("http")), send)


def raw_sessions(target: Target, attempts: Attempts) -> None:
    """Random bytes sent to side channels and transports."""
    ports = peer_ports(target)

    def send(rounds: int, data: bytes) -> None:
        with suppress(*ENDED), ports[rounds % len(ports)].open() as sock:
            sock.sendall(data)
            read_all(sock, ANSWER_S)

    fuzz(attempts, mutations(read_corpus("session")), send)


def from_the_schema(target: Target, attempts: Attempts) -> None:
    """Requests that match the published OpenAPI schema, and requests that don't."""
    warnings.simplefilter("ignore", HypothesisWarning)
    published = httpx.get(f"{target.decodes[0]}/openapi.json", timeout=60.0, trust_env=False)
    found = schemathesis.openapi.from_dict(published.json()).get_all_operations()
    operations = [result.ok() for result in found]
    served = [each for each in operations if each.path.startswith(SERVED_BY_PROXY)]
    rounds = 0
    with requests.Session() as session:
        session.trust_env = False
        session.headers.update({**target.headers, "x-request-timeout": "1"})

        def once(case: schemathesis.Case) -> None:
            if attempts.is_over:
                return
            try:
                response = case.call(
                    base_url=target.proxy, session=session, timeout=CASE_S * target.slack
                )
            except requests.RequestException as exc:
                attempts.complain(f"{case.as_curl_command()[:300]}: {exc}")
                return
            attempts.note()
            if response.status_code >= 500 and response.status_code not in ALLOWED_5XX:
                words = response.content[:200]
                attempts.complain(f"{response.status_code} {words!r} {case.as_curl_command()}")

        while not attempts.is_over:
            operation = served[rounds % len(served)]
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                strategy = operation.as_strategy(generation_mode=mode)
                with suppress(Unsatisfiable):  # a request without parameters can't be made invalid
                    _examples(attempts, rounds)(given(strategy)(once))()
            rounds += 1


ATTACKS = (
    Attack("raw-http", "Bytes against the HTTP parsers", raw_http, at_least_s=4.0),
    Attack(
        "raw-sessions",
        "Bytes against side channels and transports",
        raw_sessions,
        at_least_s=4.0,
    ),
    Attack(
        "openapi",
        "Random requests from the OpenAPI schema",
        from_the_schema,
        bounds=Bounds(growth_mib=128),
        at_least_s=8.0,
    ),
)
