"""KV residency in byte-seconds, by purpose."""

from __future__ import annotations

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
