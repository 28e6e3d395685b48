"""Transports compared with the host's limits, in turns; ``ci/bench_transfer.py`` adds other
systems' transports."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from support.figures import Figure, record

from mooncake_hal.bench.machine_limits import memcpy_mover, readv_mover, stream_mover
from mooncake_hal.bench.transfer_speed import (
    Mover,
    TransferShape,
    compare,
    latency,
    transport_mover,
)
from mooncake_hal.bench.verbs_posting import posting_us, wireless

TOTAL = 128 << 20
RANGE, BLOCKS, SMALL = (TransferShape(TOTAL, size) for size in (TOTAL, 64 << 10, 4 << 10))
ROUNDS = 7


def shm(*, mappable: bool) -> AbstractContextManager[Mover]:
    return transport_mover("shm", TOTAL, 2, mappable=mappable)


@pytest.mark.parametrize(("shape", "wanted"), [(RANGE, 0.9), (BLOCKS, 0.9), (SMALL, 0.8)], ids=str)
def test_shm_against_memcpy(
    benchmark: BenchmarkFixture, shape: TransferShape, wanted: float
) -> None:
    with memcpy_mover(TOTAL, 2) as limit, shm(mappable=True) as mover:
        found = compare([limit, mover], shape, "read", ROUNDS)
        benchmark(mover.prepare(shape, "read"))
    ratio = found["shm"].faster_than(found[limit.name])
    record(benchmark, Figure(f"shm/memcpy {shape}", ratio, wanted, "x"))


def test_shm_without_a_mapping(benchmark: BenchmarkFixture) -> None:
    with readv_mover(TOTAL, 2) as limit, shm(mappable=False) as mover:
        found = compare([limit, mover], SMALL, "read", ROUNDS)
        benchmark(mover.prepare(SMALL, "read"))
    ratio = found["shm"].faster_than(found[limit.name])
    record(benchmark, Figure(f"shm/process_vm_readv {SMALL}", ratio, 0.9, "x"))


def test_tcp_against_plain_streams(benchmark: BenchmarkFixture) -> None:
    with stream_mover(TOTAL, 2) as limit, transport_mover("tcp", TOTAL, 2, mappable=False) as tcp:
        found = compare([limit, tcp], RANGE, "read", ROUNDS)
        benchmark(tcp.prepare(RANGE, "read"))
    ratio = found["tcp"].faster_than(found[limit.name])
    record(benchmark, Figure("tcp/stream, one range", ratio, 0.95, "x"))


@pytest.mark.parametrize(("name", "wanted"), [("shm", 5.0), ("tcp", 25.0)])
def test_one_small_read(benchmark: BenchmarkFixture, name: str, wanted: float) -> None:
    with transport_mover(name, 1 << 20, 2, mappable=True) as mover:
        found = latency(mover, 4096, 2000)
        benchmark(mover.prepare(TransferShape(4096, 4096), "read"))
    record(benchmark, Figure(f"{name} read of 4 KiB p50", found.p50_us, wanted, "us", False))


@pytest.mark.parametrize("shape", [SMALL, TransferShape(TOTAL // 2, 64 << 10)], ids=str)
def test_posting_to_an_rdma_nic(benchmark: BenchmarkFixture, shape: TransferShape) -> None:
    cost = posting_us(shape, ROUNDS)
    with wireless(shape.total_bytes) as (opened, here, there):
        spans = shape.spans(here, there)
        benchmark(lambda: opened.peer.read(spans, timeout=30.0).wait())
    record(benchmark, Figure(f"rdma posting, CPU per span of {shape}", cost, 2.0, "us", False))
