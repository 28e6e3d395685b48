"""A load ends when every rank has reported; a rank that sends no report ends the instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.virtual_time import run_virtually

from mooncake_kv.errors import ConnectorDead, Fatal
from mooncake_kv.ranks import REPORT_TIMEOUT_S, STALL_CHECKS, Load, LoadReport, RankGroup, RankLoads

LOAD = Load("r", "p", (0,), (0,), 0, 4, 0, 4)
LIMIT_S = REPORT_TIMEOUT_S + 30.0
PAUSE_S = LIMIT_S / STALL_CHECKS


def loads(has_stalled: Callable[[], bool] = lambda: False) -> RankLoads:
    """The loads of an instance with two ranks."""
    return RankLoads(RankGroup(2, lambda rank, message: None), LIMIT_S, has_stalled)


def report(rank: int) -> LoadReport:
    return LoadReport("r", None, 10 + rank, 0.1)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_load_completes_when_last_rank_has_reported() -> None:
    async def main() -> None:
        ranks = loads()
        running = asyncio.ensure_future(ranks.run(LOAD))
        await asyncio.sleep(1.0)
        ranks.report(1, report(1))
        await asyncio.sleep(LIMIT_S - 10.0)
        assert not running.done()
        ranks.report(0, report(0))
        assert await running == [report(0), report(1)]

    run_virtually(main())


def test_rank_that_does_not_report_ends_the_instance() -> None:
    """The rank may still write, so the load must not fail: its blocks must not be freed."""

    async def main() -> None:
        ranks = loads()
        running = asyncio.ensure_future(ranks.run(LOAD))
        await asyncio.sleep(0)
        ranks.report(0, report(0))
        with pytest.raises(
            ConnectorDead, match=r"ranks \[1\] sent no report of the load of r within 630 s"
        ) as dead:
            await running
        assert dead.value.fatal is Fatal.MEMORY_MAY_CHANGE
        assert now() == pytest.approx(LIMIT_S)

    run_virtually(main())


def test_no_report_times_out_while_engine_does_not_step() -> None:
    """Orders wait for the rank's next step."""
    stalled_s = 5 * LIMIT_S

    async def main() -> None:
        ranks = loads(lambda: now() < stalled_s)
        running = asyncio.ensure_future(ranks.run(LOAD))
        await asyncio.sleep(stalled_s)
        assert not running.done()
        with pytest.raises(ConnectorDead):
            await running
        assert now() == pytest.approx(stalled_s + LIMIT_S, abs=PAUSE_S)

    run_virtually(main())
