"""Stores that requests name: which hosts may be connected to."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from mooncake_kv.params import PrefixSource
from mooncake_kv.pool.hinted_stores import HintedStores, HintRule
from mooncake_kv.store.chunk_store import ArenaInfo, Residence

EPOCH = "abc"
TIMEOUT_S = 20.0
KEYS = [b"key"]


class Connected:
    """A client of a store that holds every chunk."""

    arena = ArenaInfo(EPOCH, 0, 0, {})

    def probe(self, keys: Sequence[bytes]) -> Future[list[Residence]]:
        found: Future[list[Residence]] = Future()
        found.set_result([Residence.DRAM] * len(keys))
        return found


def name_stores(rule: HintRule, *hosts: str) -> tuple[list[str], Counter[str]]:
    """Have requests name stores on these hosts; returns the connected addresses and the
    counters."""
    connected: list[str] = []
    counts: Counter[str] = Counter()

    def connect(host: str, port: int) -> Any:
        connected.append(host)
        return Connected()

    async def main() -> None:
        def count(outcome: str) -> None:
            counts[outcome] += 1

        stores = HintedStores((), connect, rule, count, lambda _: None)
        for port, host in enumerate(hosts, 1):
            # Each has its own epoch: a store with a known epoch is not connected to again.
            hint = PrefixSource(host, port, EPOCH, 512)
            await stores.probe([hint], KEYS, TIMEOUT_S)
            stores._by_address.clear()

    asyncio.run(main())
    return connected, counts


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A fake name server that knows only these names."""
    known: dict[str, str] = {}

    def look_up(host: str, *_: Any, **__: Any) -> list[tuple[Any, ...]]:
        address = known.get(host, host)
        if not address[0].isdigit() and ":" not in address:
            raise socket.gaierror(f"{host} is not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


def test_without_secret_only_stores_of_this_host_are_used(names: dict[str, str]) -> None:
    names |= {"here": "127.0.0.1", "elsewhere": "192.0.2.1"}
    rule = HintRule((), has_secret=False)
    hosts = ("127.0.0.1", "here", "::1", "192.0.2.1", "elsewhere", "::ffff:192.0.2.1")
    connected, counts = name_stores(rule, *hosts)
    assert connected == ["127.0.0.1", "127.0.0.1", "::1"]
    assert counts == {"found": 3, "not_allowed": 3}


def test_with_secret_all_stores_are_used(names: dict[str, str]) -> None:
    connected, counts = name_stores(HintRule((), has_secret=True), "192.0.2.1", "elsewhere")
    assert connected == ["192.0.2.1", "elsewhere"]
    assert counts == {"found": 2}


@pytest.mark.parametrize("has_secret", [True, False])
def test_only_allowed_hosts_are_permitted_once_the_operator_names_some(
    has_secret: bool, names: dict[str, str]
) -> None:
    names["inside"] = "10.1.2.3"
    rule = HintRule(("10.0.0.0/8", "stores.example"), has_secret=has_secret)
    hosts = ("10.0.0.7", "inside", "Stores.example", "192.0.2.1", "127.0.0.1")
    connected, counts = name_stores(rule, *hosts)
    # a name is connected to at its resolved and checked address, unless it is allowed as a name
    assert connected == ["10.0.0.7", "10.1.2.3", "Stores.example"]
    assert counts == {"found": 3, "not_allowed": 2}


def test_unresolvable_host_is_a_miss_without_wait(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.TIMEOUT_S", 0.05)
    connected, counts = name_stores(HintRule((), has_secret=False), "nowhere")
    assert not connected
    assert counts == {"unreachable": 1}
