"""Signs of life come as often as the shortest lease asks for; in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from support.virtual_time import run_virtually

from mooncake_engine.kv_transfer.pace import Pace


def test_a_pause_lasts_as_long_as_the_shortest_lease_bears() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pace = Pace(lambda: 5.0)
        for count in range(1, 4):
            await pace.pause()
            assert loop.time() == pytest.approx(5.0 * count)

    run_virtually(main())


def test_a_shorter_lease_cuts_the_pause_that_is_running() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        leases = [50.0]
        pace = Pace(lambda: min(leases))
        pausing = asyncio.ensure_future(pace.pause())
        await asyncio.sleep(10.0)
        leases.append(12.0)
        pace.quicken(12.0)
        await pausing
        assert loop.time() == pytest.approx(12.0)
        leases.remove(12.0)
        await pace.pause()
        assert loop.time() == pytest.approx(62.0)

    run_virtually(main())


def test_however_many_come_the_pause_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pace = Pace(lambda: 5.0)
        pausing = asyncio.ensure_future(pace.pause())
        for _ in range(100):
            await asyncio.sleep(0.1)
            pace.quicken(5.0)
        assert pausing.done()
        assert loop.time() == pytest.approx(10.0)

    run_virtually(main())
