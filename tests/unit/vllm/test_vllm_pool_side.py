"""How much of a request that has ended is surely there to be saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.vllm_instance import Asked

from mooncake_vllm.vllm_pool_side import FirstStep, num_certain_tokens

PROMPT = [*range(40)]


def ended(
    status: str,
    num_computed: int,
    num_in_flight: int,
    num_preemptions: int = 0,
    num_sampled: int = 0,
) -> Asked:
    """A request of 40 tokens, as vLLM has it when it ends."""
    return Asked(
        "a",
        PROMPT,
        num_computed_tokens=num_computed,
        num_in_flight_tokens=num_in_flight,
        num_preemptions=num_preemptions,
        output_token_ids=[7] * num_sampled,
        status=SimpleNamespace(name=status),
    )


ABORTED = "FINISHED_ABORTED"
CASES = {
    "its client leaves while it queues": (ended(ABORTED, 0, 0), None, 0),
    "it waits for KV from elsewhere": (ended(ABORTED, 32, 0), None, 0),
    "its first step goes on, and may bring what it had": (
        ended(ABORTED, 36, 4),
        FirstStep(0, 32),
        0,
    ),
    "two steps go on": (ended(ABORTED, 40, 8), FirstStep(0, 32), 0),
    "one step is over": (ended(ABORTED, 16, 0), FirstStep(0, 0), 16),
    "one step is over and one goes on": (ended(ABORTED, 32, 16), FirstStep(0, 0), 16),
    "it decodes": (ended(ABORTED, 44, 0, num_sampled=5), FirstStep(0, 0), 44),
    "it decodes, and the next step goes on": (
        ended(ABORTED, 45, 1, num_sampled=5),
        FirstStep(0, 0),
        44,
    ),
    "drafts are checked": (ended(ABORTED, 48, 4, num_sampled=5), FirstStep(0, 0), 44),
    "it was preempted, and waits": (ended(ABORTED, 0, 1, 1, 5), FirstStep(0, 0), 0),
    "it was preempted, and waits for KV": (ended(ABORTED, 32, 0, 1, 5), FirstStep(0, 0), 0),
    "it was preempted, and a step of before goes on": (
        ended(ABORTED, 32, 17, 1, 5),
        FirstStep(1, 16),
        0,
    ),
    "it was preempted, and runs again": (ended(ABORTED, 32, 0, 1, 5), FirstStep(1, 16), 32),
    "its KV did not come": (ended("FINISHED_ERROR", 32, 0), FirstStep(0, 0), 0),
    "it has said all": (ended("FINISHED_LENGTH_CAPPED", 45, 0, num_sampled=5), None, 44),
    "it has stopped, and the next step goes on": (
        ended("FINISHED_STOPPED", 45, 1, num_sampled=5),
        None,
        44,
    ),
}


@pytest.mark.parametrize(("request_", "first_step", "wanted"), CASES.values(), ids=list(CASES))
def test_what_is_surely_there_when(
    request_: Asked, first_step: FirstStep | None, wanted: int
) -> None:
    assert num_certain_tokens(request_, first_step) == wanted
