"""The histogram of step sizes in the engine's statistics."""

from __future__ import annotations

import pytest
from support.scripted_core import ScriptedExecutor, scripted_engine

from mooncake_engine.core_messages import AddRequest
from mooncake_engine.messages import EngineRequest, StepSizes
from mooncake_engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("num_tokens", "entry"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11), (1 << 14, 14), (1 << 20, 15)],
)
def test_step_is_counted_in_the_bucket_of_the_next_power_of_two(
    num_tokens: int, entry: int
) -> None:
    sizes = StepSizes()
    sizes.note(num_tokens)
    assert sizes.num_steps == [int(i == entry) for i in range(16)]
    assert sizes.num_tokens == num_tokens


def test_core_counts_the_tokens_of_its_steps() -> None:
    core = scripted_engine(ScriptedExecutor()).core
    request = EngineRequest("a", tuple(b"tea"), SamplingParams(max_tokens=16))
    core.post(AddRequest(request))
    updates = []
    while not any(update.finish for update in updates):
        updates += core.step()
    sizes = core.report().stats.step_sizes
    assert sizes.num_steps[:3] == [3, 0, 1]  # the prompt's three tokens, then one each
    assert sizes.num_tokens == 6
    core.close()
