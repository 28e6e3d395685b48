"""Plans on their way to the ranks' processes."""

from __future__ import annotations

from dataclasses import replace

from mooncake_engine.execution import executor_messages as wire
from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.step_plan import ScheduledSequence, StepBuilder, StepPlan

PROMPT = tuple(range(1000, 21_000))


def new_request(name: str, prompt: tuple[int, ...], block_ids: list[int]) -> Request:
    request = Request(EngineRequest(name, prompt, SamplingParams()), seed=1, arrival=0.0)
    request.block_ids = block_ids
    return request


def carried(plan: StepPlan) -> tuple[StepPlan, int]:
    """The plan as a rank decodes it, and the bytes that it took."""
    encoded = wire.encode(wire.ExecuteModel(wire.PackedPlan.of(plan)))
    order = wire.decode_order(encoded)
    assert isinstance(order, wire.ExecuteModel)
    return order.packed.unpack(), len(encoded)


def test_choices_of_a_prompt_travel_with_one_copy_of_it() -> None:
    """n > 1 with a long prompt would else send megabytes to every rank within one step."""
    step = StepBuilder(1)
    choices = [new_request(f"a-{n}", PROMPT, list(range(250))) for n in range(16)]
    resumed = new_request("b", PROMPT, [7, 8])
    resumed.token_ids.append(5)
    for request in (*choices, resumed):
        step.add_new_request(request)
    sequence = ScheduledSequence("a-0", 0, 20_000, siblings=("a-1",))
    plan = replace(step.build(3, ("gone",)), sequences=(sequence,))
    found, num_bytes = carried(plan)
    assert found == plan
    assert num_bytes < 2.5 * 4 * len(PROMPT)
    assert len({id(new.token_ids) for new in found.new_requests}) == 2
    assert found.new_requests[-1].token_ids == (*PROMPT, 5)


def test_a_plan_without_new_requests_stays_as_it_is() -> None:
    plan = StepPlan(4, removed=("a",), sequences=(ScheduledSequence("b", 9, 1),))
    assert carried(plan)[0] == plan
