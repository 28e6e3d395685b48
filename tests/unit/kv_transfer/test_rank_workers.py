"""A rank's halves of the connectors, over a pool of the CPU's and real transports."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mooncake_engine.config import EngineConfig, KVTransferConfig, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.execution.extension import ExtensionContext
from mooncake_engine.execution.kv_pool import KVPool, PoolSize
from mooncake_engine.kv_transfer.pull.rank_messages import Load
from mooncake_engine.kv_transfer.pull.worker import PullWorker
from mooncake_engine.kv_transfer.push.rank_messages import StartPush
from mooncake_engine.kv_transfer.push.worker import PushWorker
from mooncake_engine.kv_transfer.rank_messages import ConnectPeer, ForgetPeer, RankReady
from mooncake_engine.kv_transfer.rank_worker import RankWorker
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, shard_of
from mooncake_hal.registry import Registry

GEOMETRY = KVGeometry(AttentionKind.GQA, 2, 2, (8, 8), "float32", 4)
CONFIG = EngineConfig(
    Path("m"), role=Role.DECODE, kv_transfer=KVTransferConfig(transports=("tcp",))
)
LOAD = Load("r", "p", (0,), (0,), 0, 4, 0)
PUSH = StartPush("r", "p", (0,), 0, 4, 0)
BOTH = pytest.mark.parametrize(("worker", "order"), [(PullWorker, LOAD), (PushWorker, PUSH)])

Make = Callable[[type[RankWorker]], RankWorker]


class Rank:
    """Where workers live, and what they told the core."""

    def __init__(self) -> None:
        backend = Registry.discover().select_backend("cpu")
        self.pool = KVPool(
            backend, 0, GEOMETRY, shard_of(GEOMETRY, 1, 0), PoolSize(4, 16), layout_name="BHLPT"
        )
        self.told: list[bytes] = []
        self.failures: list[BaseException] = []
        self.context = ExtensionContext(
            0, 1, 0, self.pool, backend, CONFIG, self.told.append, self.failures.append
        )


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.pool.close()


def opened(rank: Rank, worker: type[RankWorker]) -> tuple[RankWorker, bytes]:
    """A worker, and the order that connects it to an instance like its own."""
    running = worker(rank.context)
    ready = msgspec.msgpack.decode(rank.told.pop(), type=RankReady)
    return running, msgspec.msgpack.encode(ConnectPeer("p", (ready.facts,)))


@BOTH
def test_what_comes_behind_its_end_is_for_nobody(
    rank: Rank, worker: type[RankWorker], order: msgspec.Struct
) -> None:
    running, connect = opened(rank, worker)
    running.receive(connect)
    running.close()
    before = threading.active_count()
    for message in (msgspec.msgpack.encode(order), connect):
        running.receive(message)
    assert (rank.told, rank.failures) == ([], [])
    assert threading.active_count() == before, "nothing is begun"
    running.close()


@BOTH
def test_messages_that_meet_the_end_do_no_harm(
    rank: Rank, worker: type[RankWorker], order: msgspec.Struct, caplog: pytest.LogCaptureFixture
) -> None:
    """Orders come without a pause while it closes."""
    running, connect = opened(rank, worker)
    has_closed, raised = threading.Event(), []

    def order_on() -> None:
        running.receive(connect)
        try:
            for name in map(str, itertools.count()):
                if has_closed.is_set():
                    return
                new = msgspec.structs.replace(order, request_id=name)
                running.receive(msgspec.msgpack.encode(new))
        except RuntimeError as exc:
            raised.append(exc)

    ordering = threading.Thread(target=order_on)
    with caplog.at_level(logging.ERROR):
        ordering.start()
        running.close()
        has_closed.set()
        ordering.join()
    assert (raised, rank.failures, caplog.messages) == ([], [], [])


def test_peers_that_came_and_went_are_forgotten(rank: Rank) -> None:
    running, connect = opened(rank, PullWorker)
    [facts] = msgspec.msgpack.decode(connect, type=ConnectPeer).ranks
    for number in range(5):
        name = f"p{number}"
        running.receive(msgspec.msgpack.encode(ConnectPeer(name, (facts,))))
        running.receive(msgspec.msgpack.encode(ForgetPeer(name)))
    assert isinstance(running, PullWorker)
    assert [former.engine_id for former in running._former] == ["p4"], "the last may be ending"
    running.close()


@pytest.mark.parametrize("worker", [PullWorker, PushWorker])
def test_a_worker_wants_to_know_how_kv_moves(rank: Rank, worker: type[RankWorker]) -> None:
    alone = EngineConfig(Path("m"))
    context = ExtensionContext(
        0, 1, 0, rank.pool, rank.context.backend, alone, rank.told.append, rank.failures.append
    )
    with pytest.raises(ConfigError, match=f"{worker.__name__} needs a kv_transfer configuration"):
        worker(context)
