"""Data-parallel ranks behind the proxy: the client's header or the policy selects a rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment
from support.proxy_fakes_client import BODY, NO_TLS

from mooncake_proxy.pool.health_checks import HealthConfig

PAGE = (Path(__file__).parents[3] / "examples" / "tiny-llama" / "page.txt").read_text("utf-8")
RANK = "x-data-parallel-rank"


@asynccontextmanager
async def ranked(prefill: int, decode: int, **options: Any) -> AsyncIterator[FakeDeployment]:
    """A deployment whose P and D have published this many data-parallel ranks."""
    health = HealthConfig(interval_s=0.02)
    async with fake_deployment(health=health, **options) as s:
        s.prefill.behaviour.dp_ranks = [(0, 0)] * prefill
        s.decode.behaviour.dp_ranks = [(0, 0)] * decode
        await until_seen(s)
        yield s


async def until_seen(s: FakeDeployment) -> None:
    """Wait until the live page shows the ranks that the instances published."""
    ranks_by_url = {}
    for fake in (s.prefill, s.decode):
        ranks = fake.behaviour.dp_ranks or []
        ranks_by_url[fake.url] = [
            dict(zip(("running", "waiting"), rank, strict=True)) for rank in ranks
        ]
    wanted = {url: ranks if len(ranks) > 1 else [] for url, ranks in ranks_by_url.items()}
    deadline = asyncio.get_running_loop().time() + 30
    async with _client(s) as client:
        while True:
            view = (await client.get("/view")).json()["instances"]
            if {each["name"]: each["dp_ranks"] for each in view} == wanted:
                return
            assert asyncio.get_running_loop().time() < deadline, view
            await asyncio.sleep(0.01)


def _client(s: FakeDeployment) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=s.url, verify=NO_TLS)


async def ask(
    s: FakeDeployment, body: dict[str, Any] = BODY, rank: str | None = None
) -> httpx.Response:
    async with _client(s) as client:
        headers = {} if rank is None else {RANK: rank}
        return await client.post("/v1/completions", json=body, headers=headers)


def ranks_of(fake: FakeInstance) -> list[str | None]:
    return [seen.headers.get(RANK) for seen in fake.generated]


@pytest.mark.parametrize("streams", [False, True])
def test_rank_in_client_header_decodes(streams: bool) -> None:
    async def main() -> None:
        async with ranked(2, 4) as s:
            for rank in ("3", "1", "0"):
                assert (await ask(s, BODY | {"stream": streams}, rank)).is_success
            assert ranks_of(s.decode) == ["3", "1", "0"]
            assert ranks_of(s.prefill) == [None, "1", "0"], "P has no rank 3"
            for rank in ("7", "one"):
                await ask(s, rank=rank)
            assert ranks_of(s.decode)[-2:] == ["7", "one"], "the instance reports what is wrong"

    uvloop.run(main())


def test_client_rank_is_forwarded_if_rank_count_is_unknown() -> None:
    async def main() -> None:
        async with fake_deployment() as s:
            await ask(s, rank="5")
            await ask(s)
            assert ranks_of(s.prefill) == ranks_of(s.decode) == ["5", None]

    uvloop.run(main())


def test_prefix_blind_policy_leaves_rank_to_instance() -> None:
    async def main() -> None:
        async with ranked(4, 4) as s:
            for _ in range(4):
                await ask(s)
            assert ranks_of(s.prefill) == ranks_of(s.decode) == [None] * 4

    uvloop.run(main())


def test_prompt_goes_to_rank_with_cached_prefix() -> None:
    async def main() -> None:
        async with ranked(4, 1, prefill_policy="prefix") as s:
            for number in range(6):
                await ask(s, BODY | {"prompt": PAGE + str(number)})
            [home] = set(ranks_of(s.prefill))
            assert home is not None
            other = str((int(home) + 1) % 4)
            await ask(s, BODY | {"prompt": PAGE[::-1]}, rank=other)
            await ask(s, BODY | {"prompt": PAGE[::-1]})
            await ask(s, BODY | {"prompt": PAGE})
            assert ranks_of(s.prefill)[6:] == [other, other, home]
            assert set(ranks_of(s.decode)) == {None, other}, "the header that the client sent"

    uvloop.run(main())


def test_busy_rank_is_avoided() -> None:
    async def main() -> None:
        async with ranked(1, 2, decode_policy="prefix") as s:
            s.decode.behaviour.hangs = True
            asked = []
            for number in (1, 2):
                asked.append(asyncio.ensure_future(ask(s)))
                await s.decode.wait_for(lambda: len(s.decode.generated) == number, 30)  # noqa: B023
            assert sorted(map(str, ranks_of(s.decode))) == ["0", "1"]
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    uvloop.run(main())


def test_queues_are_reported_per_rank() -> None:
    async def main() -> None:
        async with ranked(1, 4) as s:
            s.decode.behaviour.dp_ranks = [(3, 1), (2, 0), (0, 0), (5, 7)]
            await until_seen(s)
            async with _client(s) as client:
                metrics = (await client.get("/metrics")).text
            labels = f'{{instance="{s.decode.url}",role="decode",dp_rank="3"}}'
            assert f"mooncake_proxy_dp_rank_running{labels} 5\n" in metrics
            assert f"mooncake_proxy_dp_rank_waiting{labels} 7\n" in metrics
            s.decode.behaviour.dp_ranks = [(1, 1), (0, 0)]  # restarted
            await until_seen(s)
            s.decode.behaviour.dp_ranks = None
            await until_seen(s)

    uvloop.run(main())
