"""KV residency in byte-seconds, by purpose."""

from __future__ import annotations

from typing import NoReturn

from support.scheduling import Bench
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine.core_messages import AddRequest
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.kv_residency import HeldBlocks, KVResidency


def test_byte_seconds_are_held_bytes_times_duration() -> None:
    residency = KVResidency(block_bytes=100)
    assert residency.is_due(10.0)
    residency.note(HeldBlocks(1, 1, 1, 1), 10.0)  # the time before is unknown
    assert not residency.is_due(10.05)
    assert residency.is_due(10.5)
    residency.note(HeldBlocks(running=4, reserved=0, leased=2, swapped=1), 10.5)
    residency.note(HeldBlocks(running=1, reserved=3, leased=0, swapped=0), 12.5)
    assert residency.byte_seconds == {
        "running": 400.0,
        "reserved": 600.0,
        "leased": 100.0,
        "swapped": 50.0,
    }


def test_core_counts_the_blocks_of_its_requests() -> None:
    clock = iter(float(second) for second in range(1000))
    core = scripted_engine(ScriptedExecutor(), clock=lambda: next(clock), block_bytes=1000).core
    prompt = tuple(range(40))  # two blocks of 16 and part of a third
    core.post(AddRequest(EngineRequest("a", prompt, SamplingParams(max_tokens=4))))
    for _ in range(3):
        core.step()
    held = core.report().stats.kv_byte_seconds
    assert held["running"] > 0
    assert held["running"] % 3000 == 0, "three blocks, for whole seconds"
    assert held["leased"] == held["reserved"] == held["swapped"] == 0
    core.close()


def test_block_in_several_leased_prompts_counts_once() -> None:
    bench = Bench()
    system, prompts = list(range(10, 18)), {"a": [20, 21, 22, 23], "b": [30, 31, 32, 33]}
    for name, rest in prompts.items():
        bench.add(name, system + rest, max_tokens=1, keeps_kv=True)
        bench.run()
    bench.add("runs", [*system, 40])
    bench.step()
    assert bench.scheduler.held_blocks() == HeldBlocks(running=1, reserved=0, leased=4, swapped=0)
    bench.scheduler.release("a")
    assert bench.scheduler.held_blocks() == HeldBlocks(running=1, reserved=0, leased=3, swapped=0)
    bench.scheduler.release("b")
    assert bench.scheduler.held_blocks() == HeldBlocks(running=3, reserved=0, leased=0, swapped=0)


def test_blocks_that_a_load_writes_to_are_reserved_until_it_is_drained() -> None:
    bench = Bench()
    prompt = list(range(10, 22))
    bench.add("first", prompt[:8], max_tokens=1)
    bench.run()
    bench.add("d", prompt, pulls_kv=True)
    bench.step()
    loading = HeldBlocks(running=2, reserved=1, leased=0, swapped=0)  # two are cached
    assert bench.scheduler.held_blocks() == loading
    bench.scheduler.abort("d")
    assert bench.scheduler.held_blocks() == loading
    bench.end_load("d", "cancelled")
    assert bench.scheduler.held_blocks() == HeldBlocks(0, 0, 0, 0)


class UnreadTable(list[int]):
    """A block table that must not be read block by block."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a million blocks are read between two steps")


def test_counting_reads_no_block_table() -> None:
    bench = Bench()
    request = bench.add("d", list(range(10, 22)), pulls_kv=True)
    bench.step()
    request.block_ids = UnreadTable(request.block_ids)
    assert bench.scheduler.held_blocks().reserved == 3
    bench.scheduler.abort("d")
    assert bench.scheduler.held_blocks().reserved == 3
