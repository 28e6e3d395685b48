"""One deployment of all kinds of devices behind a proxy: every P with every D."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from support.emulated_devices import KINDS, DeviceKind
from support.mixed_fleet import START_S, Side, check_idle, start_all
from support.npu import FEW, Case, clear_cases, cpu
from support.pd_processes import Served, body_of
from support.programs import Program

MAX_REQUESTS = 150
"""Requests after which a pair that had none counts as unreachable. Nine pairs, chosen at random,
have all had a request after 25 on average; after this many, one is still without in one of a
million runs."""
LENGTH = 150


@dataclass(frozen=True)
class Fleet:
    """The running deployment.

    Args:
        proxy: its URL and process.
        instances: by URL.
        kinds: each instance's kind of device, by URL.
    """

    proxy: Served
    instances: dict[str, Served]
    kinds: dict[str, str]

    def pairs(self) -> Counter[tuple[str, str]]:
        """How many requests each pair of kinds (P, D) served, according to the proxy's log."""
        found: Counter[tuple[str, str]] = Counter()
        for line in self.proxy.program.errors:
            if line.startswith("{") and (entry := json.loads(line)).get("decode"):
                found[self.kinds[entry["prefill"]], self.kinds[entry["decode"]]] += 1
        return found


@contextmanager
def fleet(model: Path, how: str, kinds: dict[str, DeviceKind] = KINDS) -> Iterator[Fleet]:
    """A P and a D of each kind, and a proxy that may pair any two."""
    prefills = [Side(name, kind.block_sizes[-1]) for name, kind in kinds.items()]
    decodes = [Side(name, kind.block_sizes[0]) for name, kind in kinds.items()]
    wanted = [("prefill", side) for side in prefills] + [("decode", side) for side in decodes]
    with ExitStack() as stack:
        instances = start_all(stack, model, how, wanted, kinds)
        argv = ["mooncake_proxy", "--port", "0", "--flow", how, "--policy", "random"]
        argv += ["--access-log", "all"]
        for (role, _), served in zip(wanted, instances, strict=True):
            argv += [f"--{role}", served.url]
        proxy = Program(argv)
        stack.callback(proxy.close)
        url = "http://" + proxy.wait_for("http://", START_S).partition("http://")[2].split()[0]
        names = {s.url: side.kind for s, (_, side) in zip(instances, wanted, strict=True)}
        yield Fleet(Served(url, proxy), {each.url: each for each in instances}, names)


async def check_deployment(
    model: Path, how: str = "pull", kinds: dict[str, DeviceKind] = KINDS
) -> list[str]:
    """Check that every pair serves requests with the CPU's tokens, without failures or leaks.

    Returns:
        Lines of a table: the number of requests from each kind to each kind.

    Raises:
        AssertionError: a check failed.
    """
    async with cpu(model) as on_cpu:
        cases = await clear_cases(on_cpu, range(LENGTH, LENGTH + 6))
    with fleet(model, how, kinds) as running:
        wanted = set(itertools.product(kinds, kinds))
        for case, number in zip(itertools.cycle(cases), range(MAX_REQUESTS), strict=False):
            if number % len(wanted) == 0 and set(running.pairs()) >= wanted:
                break
            await _check_answer(running.proxy.url, case)
        pairs = running.pairs()
        assert set(pairs) >= wanted, f"pairs without a request: {wanted - set(pairs)}"
        for url, served in running.instances.items():
            await check_idle(served)
            failures = await served.figure("mooncake:kv_transfer_load_failures")
            assert failures == 0, f"{running.kinds[url]}: {failures:g} loads failed"
    return [f"{p:>8} → {d:<8}{number:>4} requests" for (p, d), number in sorted(pairs.items())]


async def _check_answer(url: str, case: Case) -> None:
    async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
        response = await client.post(f"{url}/v1/completions", json=body_of(case.prompt, FEW))
    assert response.status_code == 200, response.text
    found = response.json()["choices"][0]["token_ids"]
    assert found == case.tokens, f"wrong tokens {found}, wanted {case.tokens}"
