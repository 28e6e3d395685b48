"""Orders to the ranks of an instance, and the stores described to the ranks."""

import asyncio

import pytest
from support.virtual_time import run_virtually

from mooncake_kv.errors import ConnectorDead, Fatal, KVTransferError
from mooncake_kv.pool.pool_messages import (
    CancelRuns,
    ConnectStore,
    ForgetStore,
    LayersLoaded,
    LoadRuns,
    RunsEnded,
    SaveRuns,
    decode_to_rank,
)
from mooncake_kv.pool.rank_orders import RankOrders
from mooncake_kv.ranks import REPORT_TIMEOUT_S, STALL_CHECKS
from mooncake_kv.store.chunk_store import ArenaInfo

LOAD = LoadRuns("load", "request", (), (), 1.0, release_layers=1)


SAVES = [SaveRuns(name, (), (), 30.0) for name in ("first", "second")]
LIMIT_S = REPORT_TIMEOUT_S + 30.0


def now():
    return asyncio.get_running_loop().time()


def opened(num_ranks=2, **options):
    """Orders to this number of ranks, and the messages sent to each rank."""
    sent = []
    orders = RankOrders(num_ranks, 256)
    orders.open(lambda rank, message: sent.append((rank, decode_to_rank(message))), **options)
    return orders, sent


def ended(name="load"):
    return RunsEnded(name, None, 1, 0.0)


def test_order_ends_once_all_ranks_have_reported():
    orders, sent = opened()

    async def run():
        released = []
        running = asyncio.ensure_future(orders.run("load", LOAD, lambda: released.append(True)))
        await asyncio.sleep(0)
        assert sent == [(0, LOAD), (1, LOAD)]
        orders.take_release(LayersLoaded("load"))
        orders.take_report(0, ended())
        orders.take_report(0, ended())
        assert not released
        assert not running.done()
        orders.take_release(LayersLoaded("load"))
        assert released == [True]
        orders.take_report(1, ended())
        assert await running == [ended(), ended()]

    asyncio.run(run())


def test_orders_end_whose_rank_stays_silent():
    orders, _ = opened()

    async def run():
        running = [asyncio.ensure_future(orders.run(save.save_id, save)) for save in SAVES]
        await asyncio.sleep(0)
        for save in SAVES:
            orders.take_report(0, ended(save.save_id))
        for save, order in zip(SAVES, running, strict=True):
            silent = rf"ranks \[1\] sent no report of {save.save_id} within 630 s"
            with pytest.raises(KVTransferError, match=silent):
                await order
        assert now() == pytest.approx(LIMIT_S)
        late = [asyncio.ensure_future(orders.await_late(save.save_id)) for save in SAVES]
        orders.take_report(1, ended("first"))
        await asyncio.sleep(1e6)
        assert [each.done() for each in late] == [True, False]

    run_virtually(run())


def test_load_ends_the_instance_whose_rank_stays_silent():
    """The rank may still write to the load's blocks."""
    orders, _ = opened()

    async def run():
        with pytest.raises(ConnectorDead, match="sent no report of load within 601 s") as dead:
            await orders.run("load", LOAD)
        assert dead.value.fatal is Fatal.MEMORY_MAY_CHANGE

    run_virtually(run())


def test_no_report_times_out_while_engine_does_not_step():
    """Ranks begin no order meanwhile."""
    stalled_s = 5 * LIMIT_S
    orders, _ = opened(has_stalled=lambda: now() < stalled_s)

    async def run():
        with pytest.raises(KVTransferError):
            await orders.run("first", SAVES[0])
        assert now() == pytest.approx(stalled_s + LIMIT_S, abs=LIMIT_S / STALL_CHECKS)

    run_virtually(run())


def test_messages_of_unknown_orders_are_ignored():
    orders, sent = opened()
    orders.take_report(0, ended("other"))
    orders.take_release(LayersLoaded("other"))
    orders.cancel("other")
    assert sent == []


def test_running_order_is_cancelled_on_all_ranks():
    orders, sent = opened()

    async def run():
        running = asyncio.ensure_future(orders.run("load", LOAD))
        await asyncio.sleep(0)
        orders.cancel("load")
        for rank in range(2):
            orders.take_report(rank, ended())
        await running
        orders.cancel("load")

    asyncio.run(run())
    assert sent[2:] == [(0, CancelRuns("load")), (1, CancelRuns("load"))]


def test_store_is_described_once_per_epoch():
    orders, sent = opened(num_ranks=1)
    for epoch in ("first", "first", "second"):
        assert orders.introduce(0, ArenaInfo(epoch, 4096, 8192)) == epoch
    assert [message for _, message in sent] == [
        ConnectStore("first", 4096, 8192, {}, 256),
        ForgetStore("first"),
        ConnectStore("second", 4096, 8192, {}, 256),
    ]


def test_store_with_two_numbers_is_disconnected_with_the_last_one():
    orders, sent = opened(num_ranks=1)
    for number in (0, 1):
        orders.introduce(number, ArenaInfo("epoch", 4096, 8192))
    del sent[:]
    orders.forget(0)
    orders.forget(0)
    assert sent == []
    orders.forget(1)
    assert sent == [(0, ForgetStore("epoch"))]


def test_nothing_is_sent_after_close():
    orders, sent = opened()
    orders.close()
    assert not orders.is_open
    orders.introduce(0, ArenaInfo("epoch", 4096, 8192))
    assert sent == []
