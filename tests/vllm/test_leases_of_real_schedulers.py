"""P's leases between vLLM's real schedulers: one that nobody reads, one that several data-parallel
ranks of D are given, and one beside the pool, in both orders of a MultiConnector."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from support.vllm_scheduler import (
    BLOCK_SIZE,
    VllmInstance,
    answer_to,
    engine_config,
    settle,
    vllm_instance,
)
from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.interface import PauseState

from mooncake_vllm.errors import UnsupportedByVllmConnector

NUM_BLOCKS = 40
SETTLED_S = 60.0
LEASES_S = 12.0
"""Six leases, in seconds."""
POOL = "dram=1MiB,chunk=8"
PROMPT = [*range(3, 40)]
NUM_TOKENS = 4
SCHEDULERS = pytest.mark.parametrize("is_async", [False, True], ids=["Scheduler", "AsyncScheduler"])
ORDERS = pytest.mark.parametrize("is_pool_first", [False, True], ids=["pool last", "pool first"])


def instance(role: str, *, policy: str = "fail", **options: Any) -> AbstractContextManager[Any]:
    return vllm_instance(engine_config(role, "HalPullConnector", policy, **options), NUM_BLOCKS)


def prefill_one(prefill: VllmInstance) -> dict[str, Any]:
    """Compute the prompt at P; returns the params of its answer."""
    prefill.submit("p", PROMPT, 1, {"do_remote_decode": True})
    while prefill.answers["p"].params is None:
        prefill.step()
    params = prefill.answers["p"].params
    assert params is not None
    return params


def check_nothing_is_left(*instances: VllmInstance) -> None:
    for each in instances:
        assert each.num_free == NUM_BLOCKS - 1
        assert each.figures()["hook_errors"] == each.figures()["leases_held"] == 0
        assert each.leftovers() == []


@SCHEDULERS
def test_lease_without_a_reader_expires_and_is_published(is_async: bool) -> None:
    """The client or the proxy has gone before D was asked."""
    with instance("kv_producer", is_async=is_async) as prefill:
        prefill_one(prefill)
        assert prefill.num_free == NUM_BLOCKS - 1 - -(-len(PROMPT) // BLOCK_SIZE)
        prefill.step()
        prefill.step()
        assert prefill.published["leases_held"] == 1
        settle([prefill], SETTLED_S)
        assert prefill.published["leases_held"] == 0
        assert prefill.published["leases_expired"] == 1
        check_nothing_is_left(prefill)


@SCHEDULERS
def test_lease_is_released_by_a_refused_request_of_p_itself(is_async: bool) -> None:
    """As a proxy does that knows that no D will read the KV: vLLM's P has no other way in."""
    with instance("kv_producer", is_async=is_async) as prefill:
        params = prefill_one(prefill)
        prefill.submit("refused", [], 1, params, is_refused=True)
        settle([prefill], SETTLED_S)
        assert prefill.figures()["leases_expired"] == 0
        check_nothing_is_left(prefill)


def test_lease_is_not_renewed_by_a_paused_d_that_has_not_begun_to_read() -> None:
    """P's own pause is complete only once no lease is left."""
    with (
        instance("kv_producer", is_async=False) as prefill,
        instance("kv_consumer", policy="recompute", is_async=False) as d,
    ):
        params = prefill_one(prefill)
        d.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        d.submit("d", PROMPT, NUM_TOKENS, params)
        settle([prefill], LEASES_S)
        d.scheduler.set_pause_state(PauseState.UNPAUSED)
        settle([d], SETTLED_S)
        assert d.answers["d"].tokens == answer_to(PROMPT, NUM_TOKENS)
        check_nothing_is_left(prefill, d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@SCHEDULERS
def test_choices_on_several_ranks_are_all_answered(is_async: bool, policy: str) -> None:
    """vLLM spreads the children of a request with ``n`` over its data-parallel ranks, of which each
    has a connector of its own. P's lease has one reader."""
    with ExitStack() as stack:
        prefill = stack.enter_context(instance("kv_producer", is_async=is_async))
        ranks = [
            stack.enter_context(instance("kv_consumer", policy=policy, is_async=is_async))
            for _ in range(2)
        ]
        params = prefill_one(prefill)
        for child in range(4):
            ranks[child % 2].submit(f"{child}_cmpl-r-0", PROMPT, NUM_TOKENS, params)
        settle([prefill, *ranks], SETTLED_S)
        for child in range(4):
            answer = ranks[child % 2].answers[f"{child}_cmpl-r-0"]
            assert (answer.finish, answer.tokens) == ("length", answer_to(PROMPT, NUM_TOKENS))
        assert [rank.figures()["loads"] for rank in ranks] == [1, 0]
        assert prefill.figures()["leases_expired"] == 0, "the first child's rank has read the KV"
        check_nothing_is_left(prefill, *ranks)


@ORDERS
@SCHEDULERS
def test_pair_beside_the_pool_in_either_order(is_async: bool, is_pool_first: bool) -> None:
    options = {"is_async": is_async, "pool": POOL, "is_pool_first": is_pool_first}
    with instance("kv_producer", **options) as prefill, instance("kv_consumer", **options) as d:
        params = prefill_one(prefill)
        d.submit("d", PROMPT, NUM_TOKENS, params)
        settle([prefill, d], SETTLED_S)
        assert d.answers["d"].finish == "length"
        assert d.answers["d"].tokens == answer_to(PROMPT, NUM_TOKENS)
        assert d.figures()["loads"] == 1
        assert prefill.figures()["leases_expired"] == 0
        check_nothing_is_left(prefill, d)


@ORDERS
def test_role_of_a_child_decides_what_it_may_do(is_pool_first: bool) -> None:
    """MultiConnector's own role is kv_both, whatever its children's are."""
    options = {"is_async": False, "pool": POOL, "is_pool_first": is_pool_first}
    with instance("kv_producer", **options) as prefill:
        params = prefill_one(prefill)
        prefill.submit("d", PROMPT, NUM_TOKENS, params)
        settle([prefill], SETTLED_S)
        assert prefill.answers["d"].tokens == answer_to(PROMPT, NUM_TOKENS)
        assert prefill.figures()["loads"] == 0
        assert prefill.figures()["refused_requests"] == 1
        check_nothing_is_left(prefill)


@ORDERS
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_pool_that_could_only_load_or_save_is_refused(is_pool_first: bool, role: str) -> None:
    config = engine_config(
        "kv_both", "HalPullConnector", "fail", is_async=False, pool=POOL,
        is_pool_first=is_pool_first, has_events=role == "kv_producer",
    )  # fmt: skip
    connectors = config.kv_transfer_config.kv_connector_extra_config["connectors"]
    [pool] = [each for each in connectors if each["kv_connector"] == "HalPoolConnector"]
    pool["kv_role"] = role
    with (
        pytest.raises(UnsupportedByVllmConnector, match=f"its kv_role is {role}: use kv_both"),
        vllm_instance(config, NUM_BLOCKS),
    ):
        pass


@ORDERS
@pytest.mark.parametrize("connector", ["HalPushConnector", "HalPullConnector"])
def test_role_of_multiconnector_must_protect_pushed_blocks(
    is_pool_first: bool, connector: str
) -> None:
    """With two batches in flight, as a producer vLLM gives a request blocks that a step still
    writes. Reads wait for the step, which a peer that pushes can't."""
    config: Any = copy.deepcopy(
        engine_config(
            "kv_consumer", connector, "fail", is_async=True, pool=POOL, is_pool_first=is_pool_first
        )
    )
    config.kv_transfer_config.kv_role = "kv_producer"
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))  # as vLLM does in its workers
        if connector == "HalPushConnector":
            stack.enter_context(
                pytest.raises(UnsupportedByVllmConnector, match="use kv_both for MultiConnector")
            )
        stack.enter_context(vllm_instance(config, NUM_BLOCKS))
