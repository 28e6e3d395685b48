"""Expired leases, restarted instances, lost messages, incompatible peers, and aborts."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import pd_transport
from support.pd import (
    GREEDY,
    ORDER,
    Answer,
    Instance,
    Pair,
    ask,
    ask_pair,
    instance,
    make_config,
    pair,
    prefill,
    prompt_of,
    start,
    wait_until,
    write_model,
)
from support.pd_relay import Relay, dropping, relay, unreliable
from support.pd_transport import Gate
from support.push import WAYS, ask_pushed, early_pull_pair, push_pair

from mooncake_engine.config import Role
from mooncake_engine.errors import ConfigError, InvalidRequest, PortInUse
from mooncake_engine.messages import FinishReason
from mooncake_hal.testing.backends import free_port
from mooncake_kv import side_channel
from mooncake_kv.config import LoadFailurePolicy
from mooncake_kv.connector import REFUSED
from mooncake_kv.model_fingerprint import model_fingerprint
from mooncake_kv.params import KVTransferDict

PROMPT = prompt_of(100)
LEASE_S = 1.0
SLOW = {"max_num_batched_tokens": 1}
"""One step per token, so that a prefill does not end before the peer was asked."""
GATED: dict[str, Any] = {"transports": (pd_transport.NAME,), "lease_s": LEASE_S}


async def expected_of(model: Path, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """The answer of a single instance."""
    async with instance(model) as single:
        return (await ask(single, prompt)).tokens


def run(
    model: Path, scenario: Callable[[Pair, list[int]], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run a scenario on a pair; afterwards both still serve and all blocks are free."""

    async def main() -> None:
        expected = await expected_of(model)
        async with pair(model, **{**GATED, **options}) as both:
            await scenario(both, expected)
            assert (await ask_pair(both, PROMPT)).tokens == expected
            await both.check_clean(LEASE_S + 5.0)

    asyncio.run(main())


# --- leases ----------------------------------------------------------------------------------


def test_unclaimed_lease_expires(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        await prefill(both.prefill, PROMPT)
        assert both.prefill.engine.stats().kv_cache_usage > 0
        await both.check_clean(within_s=LEASE_S + 2.0)
        assert both.prefill.stat("leases_expired") == 1

    run(model, scenario)


async def overwrite_pool(of: Instance) -> None:
    """Make the instance reuse every one of its blocks."""
    for seed in range(4):
        await ask(of, prompt_of(490, seed=seed), replace(GREEDY, max_tokens=1))


@pytest.mark.parametrize("policy", list(LoadFailurePolicy), ids=lambda p: p.value)
def test_blocks_reused_before_read_are_not_decoded_from(
    model: Path, gate: Gate, policy: LoadFailurePolicy
) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        params = await prefill(both.prefill, PROMPT)
        await both.prefill.check_clean(within_s=LEASE_S + 2.0)
        await overwrite_pool(both.prefill)
        answer = await ask(both.decode, PROMPT, GREEDY, params)
        check_failed_load(answer, expected, policy, "lease was expired")

    run(model, scenario, prefill={"num_kv_blocks": 34}, load_failure=policy)


@pytest.mark.parametrize("policy", list(LoadFailurePolicy), ids=lambda p: p.value)
def test_lease_lost_during_read_is_detected(
    model: Path, gate: Gate, policy: LoadFailurePolicy
) -> None:
    """Renewals are lost, P reuses the blocks, and the read continues."""

    async def scenario(both: Pair, expected: list[int]) -> None:
        params = await prefill(both.prefill, PROMPT)
        async with relay(params["remote_host"], params["remote_port"]) as between:
            between.delivery = dropping("renew")
            gate.close()
            params["remote_port"] = between.port
            answer = asyncio.create_task(ask(both.decode, PROMPT, GREEDY, params))
            await wait_until(lambda: gate.num_held == 1, 5.0)
            await both.prefill.check_clean(within_s=LEASE_S + 2.0)
            await overwrite_pool(both.prefill)
            gate.open()
            check_failed_load(await answer, expected, policy, "lease was expired")

    long_lease = {"lease_s": 30.0}
    options = {"prefill": {"num_kv_blocks": 34}, "decode": long_lease, "load_failure": policy}
    run(model, scenario, **options)


def check_failed_load(
    answer: Answer, expected: list[int], policy: LoadFailurePolicy, reason: str
) -> None:
    """Check that the answer has the right tokens or an error with its reason."""
    if policy is LoadFailurePolicy.RECOMPUTE:
        assert answer.tokens == expected
    else:
        assert answer.finish is FinishReason.ERROR
        assert reason in str(answer.error)


@pytest.mark.parametrize("readers_lease_s", [LEASE_S, 60 * LEASE_S])
def test_lease_is_renewed_while_reader_is_queued(
    model: Path, gate: Gate, readers_lease_s: float
) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        params = await prefill(both.prefill, PROMPT)
        answer = asyncio.create_task(ask(both.decode, PROMPT, GREEDY, params))
        await asyncio.sleep(3 * LEASE_S)
        assert both.prefill.stat("leases_expired") == 0
        gate.open()
        assert (await answer).tokens == expected
        assert both.decode.stat("load_failures") == 0

    run(model, scenario, decode={"lease_s": readers_lease_s})


# --- messages ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_retry_intervals")
@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_and_late_messages(model: Path, gate: Gate, seed: int) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        first = await prefill(both.prefill, PROMPT)
        async with relay(first["remote_host"], first["remote_port"]) as between:
            between.delivery = unreliable(seed)
            await both.check_clean(within_s=30.0)
            answers = await asyncio.gather(*(through(between, both) for _ in range(6)))
            assert [answer.tokens for answer in answers] == [expected] * 6
            assert len(between.seen) > 12
            await both.check_clean(within_s=30.0)

    run(model, scenario)


async def through(between: Relay, both: Pair) -> Answer:
    params = await prefill(both.prefill, PROMPT)
    return await ask(both.decode, PROMPT, GREEDY, {**params, "remote_port": between.port})


@pytest.fixture
def short_retry_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry requests sooner than in production, where responses come from other hosts."""
    monkeypatch.setattr(side_channel, "TRY_TIMEOUT_S", 0.3)


@pytest.mark.usefixtures("short_retry_intervals")
@pytest.mark.parametrize("lost", [("done",), ("leasereply",), ("hello",), ("welcome",)], ids=str)
def test_message_type_that_never_arrives(model: Path, gate: Gate, lost: tuple[str, ...]) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        first = await prefill(both.prefill, PROMPT)
        async with relay(first["remote_host"], first["remote_port"]) as between:
            between.delivery = dropping(*lost)
            assert (await through(between, both)).tokens == expected
            assert both.decode.stat("load_failures") == 1
            await both.check_clean(within_s=30.0)

    run(model, scenario)


# --- other epochs ------------------------------------------------------------------------


def test_restarted_prefill_instance_has_new_epoch(model: Path, gate: Gate) -> None:
    async def main() -> None:
        expected = await expected_of(model)
        port = free_port()
        async with instance(model, Role.DECODE, **GATED) as decode:
            async with instance(model, Role.PREFILL, **GATED, port=port) as first:
                assert (await ask_pair(Pair(first, decode), PROMPT)).tokens == expected
                stale = [await prefill(first, PROMPT) for _ in range(3)]
            async with instance(model, Role.PREFILL, **GATED, port=port) as second:
                both = Pair(second, decode)
                tasks = [ask(decode, PROMPT, GREEDY, params) for params in stale]
                answers = await asyncio.gather(*tasks, ask_pair(both, PROMPT))
                assert [answer.tokens for answer in answers] == [expected] * 4
                assert (await ask_pair(both, PROMPT)).tokens == expected
                await both.check_clean()

    asyncio.run(main())


def test_prefill_instance_lost_while_requests_are_queued_for_its_kv(
    model: Path, gate: Gate
) -> None:
    """More prompts than fit D's blocks: some load, some wait for blocks."""

    async def main() -> None:
        prompts = [prompt_of(200, seed=seed) for seed in range(4)]
        expected = [await expected_of(model, prompt) for prompt in prompts]
        async with instance(model, Role.DECODE, **GATED, num_kv_blocks=34) as decode:
            async with instance(model, Role.PREFILL, **GATED) as first:
                gate.close()
                tasks = [
                    asyncio.create_task(ask(decode, p, GREEDY, await prefill(first, p)))
                    for p in prompts
                ]
                await wait_until(lambda: gate.num_held == 2, 5.0)
            gate.open()
            answers = await asyncio.gather(*tasks)
            assert [answer.tokens for answer in answers] == expected
            await decode.check_clean()

    asyncio.run(main())


# --- incompatible peers ------------------------------------------------------------------------


def test_other_model_is_rejected_naming_both(model: Path, gate: Gate, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=5)
    check_mismatch(model, other, {}, {}, "model differs")


def test_adapter_merged_on_one_side_is_rejected_naming_both(
    model: Path, gate: Gate, tmp_path: Path
) -> None:
    """The files have the same names, sizes and headers; one query and one value matrix differ."""
    merged = merge_adapter(model, tmp_path / "merged", ("q_proj", "v_proj"))
    for prefills, decodes in ((model, merged), (merged, model)):
        reason = check_mismatch(prefills, decodes, {}, {}, "model differs")
        assert "an adapter merged into it" in reason
        for directory in (model, merged):
            assert model_fingerprint(directory, "float32").weights in reason


def test_other_rope_is_rejected_naming_both(model: Path, gate: Gate, tmp_path: Path) -> None:
    scaled = tmp_path / "scaled"
    shutil.copytree(model, scaled)
    config = json.loads((scaled / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500000.0
    (scaled / "config.json").write_text(json.dumps(config))
    reason = check_mismatch(model, scaled, {}, {}, "the model's rope differs")
    assert "10000.0" in reason
    assert "500000.0" in reason


def merge_adapter(model: Path, merged: Path, modules: tuple[str, ...]) -> Path:
    """A copy of a model with a LoRA of rank 2 merged into these modules of its last layer."""
    shutil.copytree(model, merged)
    path = merged / "model.safetensors"
    tensors = load_file(path)
    names = [n for n in tensors if "layers.1." in n and n.split(".")[-2] in modules]
    assert len(names) == len(modules)
    generator = torch.Generator().manual_seed(1)
    for name in names:
        rows, columns = tensors[name].shape
        up, down = (torch.randn(s, generator=generator) for s in ((rows, 2), (2, columns)))
        tensors[name] += 0.01 * up @ down
    with safe_open(path, framework="pt") as source:
        save_file(tensors, path, metadata=source.metadata())
    return merged


def test_peer_with_other_secret_is_rejected(model: Path, gate: Gate) -> None:
    check_mismatch(model, model, {"secret": "one"}, {"secret": "two"}, "has another secret")


@pytest.mark.parametrize("make_both", [early_pull_pair, push_pair])
def test_prefill_whose_reader_has_another_secret_fails_at_once(
    model: Path, make_both: Callable[..., Any]
) -> None:
    """A proxy then ends the wait of the reader, which has heard nothing."""
    options = {"prefill": {"secret": "one", **SLOW}, "decode": {"secret": "two"}}

    async def main() -> None:
        async with make_both(model, lease_s=LEASE_S, **options) as both:
            answer = await ask_pushed(both, PROMPT)
            assert answer.finish is FinishReason.LENGTH, "it computes the prompt itself"
            [prefill] = both.prefills.values()
            assert prefill.finish is FinishReason.ERROR
            assert prefill.error == REFUSED
            assert both.prefill.stat("refused_peers") == 1
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["pulled", "pushed"])
def test_pair_that_no_transport_connects_is_noted_at_its_first_request(
    model: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The handshake finds both transports fit, but what the ranks have published rules them out."""
    monkeypatch.setattr(pd_transport.GatedTransport, "reaches", lambda *_: "it is on another host")
    make_both, ask_both = WAYS[way]

    async def main() -> None:
        async with make_both(model, **GATED) as both:
            answer = await ask_both(both, PROMPT)
            assert answer.finish is FinishReason.LENGTH, "the reader computes the prompt itself"
            mover = both.decode if way == "pulled" else both.prefill
            assert mover.stat("refused_peers") == 1
            await both.check_clean()

    asyncio.run(main())


def test_other_dtype_is_rejected_naming_both(model: Path, gate: Gate) -> None:
    reason = check_mismatch(model, model, {}, {"dtype": "bfloat16"}, "the model's dtype differs")
    assert "float32" in reason
    assert "bfloat16" in reason


def test_other_kv_dtype_is_rejected_naming_both(model: Path, gate: Gate) -> None:
    reason = check_mismatch(model, model, {}, {"kv_cache_dtype": "fp8"}, "the dtype of KV differs")
    assert "float32" in reason
    assert "float8_e4m3fn" in reason


def check_mismatch(
    model: Path,
    other: Path,
    prefill_options: Any,
    decode_options: Any,
    reason: str,
) -> str:
    """Both instances survive the rejection, which names the reason; returns it. The receiver of the
    metadata checks it."""
    failing = {**GATED, "load_failure": LoadFailurePolicy.FAIL}

    async def main() -> str:
        async with (
            instance(model, Role.PREFILL, **failing, **prefill_options) as first,
            instance(other, Role.DECODE, **failing, **decode_options) as second,
        ):
            both = Pair(first, second)
            answer = await ask_pair(both, PROMPT)
            assert answer.finish is FinishReason.ERROR
            assert reason in str(answer.error)
            names = ("refused_peers", "refused_loads")
            assert tuple(map(second.stat, names)) == (1, 1)
            assert (await ask(second, PROMPT)).finish is FinishReason.LENGTH
            assert (await ask(first, PROMPT)).finish is FinishReason.LENGTH
            await both.check_clean(LEASE_S + 10.0)
            return str(answer.error)

    return asyncio.run(main())


def test_taken_port_fails_start_and_leaves_nothing(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1.*is taken"):
            start(make_config(model, Role.PREFILL, port=port))
    running = start(make_config(model, Role.PREFILL, port=port))
    running.engine.close()


def test_unknown_transport_fails_start(model: Path) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        start(make_config(model, Role.PREFILL, transports=("pigeon",)))


def test_malformed_params_are_rejected_without_side_effects(model: Path, gate: Gate) -> None:
    bad: list[KVTransferDict] = [
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "do_remote_decode": True},
    ]

    async def scenario(both: Pair, expected: list[int]) -> None:
        params = await prefill(both.prefill, PROMPT)
        running = asyncio.create_task(ask(both.decode, PROMPT, GREEDY, params))
        out_of_range = {**params, "last_token_id": 10_000}
        for change in [*bad, out_of_range, {**params, "remote_port": 2**80}]:
            with pytest.raises(InvalidRequest):
                await ask(both.decode, PROMPT, GREEDY, change)
        assert (await running).tokens == expected

    run(model, scenario)


# --- aborts ------------------------------------------------------------------------------------


def test_abort_frees_blocks_of_finished_prefill(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        params = await prefill(both.prefill, PROMPT)
        for _ in range(2):
            both.prefill.engine.abort(params["remote_request_id"])
        await both.prefill.check_clean(within_s=LEASE_S / 2)
        answer = await ask(both.decode, PROMPT, GREEDY, params)
        assert answer.tokens == expected

    run(model, scenario)


def test_abort_during_load_drains_transfer_first(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        answer = asyncio.create_task(ask_pair(both, PROMPT))
        await wait_until(lambda: gate.num_held == 1, 5.0)
        answer.cancel()
        await both.check_clean(within_s=LEASE_S)
        gate.open()

    run(model, scenario)


def test_abort_while_waiting_for_blocks(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        gate.close()
        first = asyncio.create_task(ask_pair(both, prompt_of(400)))
        await wait_until(lambda: gate.num_held == 1, 5.0)
        second = asyncio.create_task(ask_pair(both, prompt_of(300)))
        await wait_until(lambda: both.decode.engine.stats().num_waiting == 2, 5.0)
        second.cancel()
        await wait_until(lambda: both.prefill.stat("leases_held") == 1, LEASE_S)
        gate.open()
        assert (await first).finish is FinishReason.LENGTH

    run(model, scenario, decode={"num_kv_blocks": 34})


def test_abort_while_decoding(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        seen: list[int] = []
        endless = replace(GREEDY, max_tokens=400)
        params = await prefill(both.prefill, PROMPT)
        answer = asyncio.create_task(
            ask(both.decode, PROMPT, endless, params, lambda u: seen.extend(u.token_ids))
        )
        await wait_until(lambda: len(seen) > 3, 5.0)
        answer.cancel()
        await both.check_clean(within_s=LEASE_S)

    run(model, scenario)


def test_abort_of_queued_prefill(model: Path, gate: Gate) -> None:
    async def scenario(both: Pair, expected: list[int]) -> None:
        endless = replace(GREEDY, max_tokens=400)
        busy = asyncio.create_task(ask(both.prefill, PROMPT, endless))
        await wait_until(lambda: both.prefill.engine.stats().num_running == 1, 5.0)
        waiting = asyncio.create_task(ask(both.prefill, PROMPT, GREEDY, ORDER))
        await wait_until(lambda: both.prefill.engine.stats().num_waiting == 1, 5.0)
        waiting.cancel()
        await wait_until(lambda: both.prefill.engine.stats().num_waiting == 0, 5.0)
        busy.cancel()
        await both.prefill.check_clean(within_s=LEASE_S)

    run(model, scenario, prefill={"max_num_seqs": 1})


def test_abort_during_prefill(model: Path, gate: Gate) -> None:
    """Chunks of 16 tokens: the prefill takes many steps and is aborted in the middle."""

    async def scenario(both: Pair, expected: list[int]) -> None:
        answers = [
            asyncio.create_task(ask(both.prefill, prompt_of(490, seed=seed), GREEDY, ORDER))
            for seed in range(4)
        ]
        await wait_until(lambda: both.prefill.engine.stats().num_running > 0, 5.0)
        for answer in answers:
            answer.cancel()
        await both.prefill.check_clean(within_s=LEASE_S)

    run(model, scenario, prefill={"max_num_batched_tokens": 16})
