"""The placement of requests on data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from mooncake_engine.messages import EngineRequest, FinishReason, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.dp_placement import DECODE_TOKENS, RequestPlacement
from mooncake_engine.scheduling.step_plan import ExpertRound, ScheduledSequence, StepPlan

NOTHING = (0, 0)


def request(name: str, length: int = 100) -> EngineRequest:
    return EngineRequest(name, (1,) * length, SamplingParams())


def test_request_goes_to_the_least_loaded_rank() -> None:
    placement = RequestPlacement(2)
    assert placement.place(request("long", 1000), NOTHING) == 0
    assert [placement.place(request(f"r{n}"), NOTHING) for n in range(3)] == [1, 1, 1]
    placement.note(TokenUpdate("long", (5,)))  # its prompt is computed
    assert placement.place(request("next"), NOTHING) == 0


def test_cached_prefix_reduces_the_load_of_a_request() -> None:
    placement = RequestPlacement(2)
    assert placement.place(request("a"), (0, 96)) == 1
    assert placement.place(request("b"), (0, 96)) == 1, (
        "the wait costs less than computing the prefix"
    )
    for number in range(2):
        placement.place(replace(request(f"c{number}", 200), data_parallel_rank=1), NOTHING)
    assert placement.place(request("d"), (0, 96)) == 0


def test_finished_request_is_no_load() -> None:
    placement = RequestPlacement(2)
    placement.place(request("a", 1000), NOTHING)
    placement.note(TokenUpdate("a", (5,), finish=FinishReason.LENGTH))
    placement.remove("a")  # a late abort
    placement.place(request("b"), NOTHING)
    assert placement.place(request("c"), NOTHING) == 1


def test_running_requests_are_spread() -> None:
    placement = RequestPlacement(2)
    placed = []
    for number in range(6):
        placed.append(placement.place(request(f"r{number}", 10), NOTHING))
        placement.note(TokenUpdate(f"r{number}", (5,)))
    assert placed == [0, 1, 0, 1, 0, 1]
    assert DECODE_TOKENS > 10


def test_siblings_share_a_rank_until_all_have_finished() -> None:
    placement = RequestPlacement(2)
    group = [replace(request(f"n{n}"), group="n") for n in range(3)]
    assert not placement.has_sibling(group[0])
    assert [placement.place(one, NOTHING) for one in group[:2]] == [0, 0]
    assert placement.place(request("other"), NOTHING) == 1
    assert placement.has_sibling(group[2])
    assert not placement.has_sibling(request("single"))
    assert placement.place(group[2], NOTHING) == 0
    for one in group:
        placement.remove(one.request_id)
    assert placement.place(group[0], NOTHING) == 0
    assert not placement._groups.keys() - {"n"}


def plan(*counts: int, drafts: int = 0) -> StepPlan:
    sequences = [
        ScheduledSequence(f"r{n}", 0, count, num_draft_tokens=drafts)
        for n, count in enumerate(counts)
    ]
    return StepPlan(0, sequences=tuple(sequences))


def test_round_is_dispatched_if_a_rank_has_many_tokens_or_drafts() -> None:
    assert ExpertRound.of([plan(), plan()], 10) is None
    assert ExpertRound.of([plan(3, 4), plan()], 10) == ExpertRound((7, 0), is_dispatched=False)
    assert ExpertRound.of([plan(3), plan(6, 4)], 10) == ExpertRound((3, 10), is_dispatched=True)
    assert ExpertRound.of([plan(1), plan(1, drafts=2)], 10) == ExpertRound((1, 3), True)
