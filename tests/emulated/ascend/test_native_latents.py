"""A decode instance that keeps latents as tiles generates the CPU's tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.npu import FEW, OVER_HCCS, clear_cases, cpu, write_family
from support.pd import ORDER, ask, ask_pair, instance, pair, prefill

from mooncake_engine.config import Role
from mooncake_engine.errors import InvalidRequest

AS_ROWS = {"kv_layout": "LPBTH"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("models"), "deepseek_v3")


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 64}, {"async_scheduling": True}],
    ids=["whole", "chunked", "async"],
)
def test_prompts_without_a_peer(model: Path, options: dict[str, Any]) -> None:
    """Without a peer: without a cached prefix, with one, and beside other requests' decodes."""

    async def main() -> None:
        alone = instance(model, Role.DECODE, **OVER_HCCS, **options)
        async with cpu(model) as on_cpu, alone as on_npu:
            assert not on_npu.engine.info.lends_kv
            cases = await clear_cases(on_cpu)
            found = await asyncio.gather(*[ask(on_npu, case.prompt, FEW) for case in cases])
            assert [each.tokens for each in found] == [case.tokens for case in cases]
            again = await ask(on_npu, cases[-1].prompt, FEW)
            assert again.tokens == cases[-1].tokens
            assert again.num_cached_tokens >= 128
            await on_npu.check_clean()

    asyncio.run(main())


def test_received_blocks_are_shared_copied_and_swapped(model: Path) -> None:
    """Two answers to each of two loaded prompts that nearly fill a block, with too few blocks.

    The answers are long, so that one prompt's answers still hold their blocks when the other
    prompt's KV has arrived.
    """
    long = replace(FEW, max_tokens=60)

    async def main() -> None:
        cramped = {"num_kv_blocks": 6, "swap_space_bytes": 8 << 20, "prefix_caching": False}
        cramped["async_scheduling"] = False
        async with (
            cpu(model) as on_cpu,
            pair(model, decode=cramped, **OVER_HCCS) as both,
        ):
            cases = await clear_cases(on_cpu, (125, 126))
            orders = [await prefill(both.prefill, case.prompt, FEW) for case in cases]
            twice = [each for each in zip(cases, orders, strict=True) for _ in range(2)]
            found = await asyncio.gather(
                *[
                    ask(both.decode, case.prompt, long, order, group=str(len(case.prompt)))
                    for case, order in twice
                ]
            )
            begun = [each.tokens[: FEW.max_tokens] for each in found]
            assert begun == [case.tokens for case, _ in twice]
            assert both.decode.engine.stats().num_swap_outs > 0
            await both.check_clean()

    asyncio.run(main())


@pytest.mark.parametrize("decode", [{}, AS_ROWS], ids=["tiles", "rows"])
def test_received_prefix_is_not_loaded_again(model: Path, decode: dict[str, Any]) -> None:
    """The second prompt reuses the first one's full blocks; only the rest is loaded."""

    async def main() -> None:
        async with cpu(model) as on_cpu, pair(model, decode=decode, **OVER_HCCS) as both:
            assert both.prefill.engine.info.lends_kv
            assert both.decode.engine.info.lends_kv == bool(decode)
            [case] = await clear_cases(on_cpu, (300,))
            longer = (*case.prompt, *case.tokens, 7, 8, 9)
            wanted = await ask(on_cpu, longer, FEW)
            assert (await ask_pair(both, case.prompt, FEW)).tokens == case.tokens
            loaded = both.decode.stat("bytes_received")
            assert (await ask_pair(both, longer, FEW)).tokens == wanted.tokens
            assert both.decode.stat("bytes_received") - loaded < loaded / 3
            assert both.decode.stat("load_failures") == 0
            await both.check_clean()

    asyncio.run(main())


def test_prompt_of_lost_peer_is_computed_locally(model: Path) -> None:
    """The prefill instance is gone when D asks for its KV."""

    async def main() -> None:
        decode = instance(model, Role.DECODE, **OVER_HCCS)
        async with cpu(model) as on_cpu, decode as on_npu:
            [case] = await clear_cases(on_cpu, (200,))
            async with instance(model, Role.PREFILL, **OVER_HCCS) as gone:
                order = await prefill(gone, case.prompt, FEW)
            assert (await ask(on_npu, case.prompt, FEW, order)).tokens == case.tokens
            assert on_npu.stat("load_failures") == 1
            await on_npu.check_clean()

    asyncio.run(main())


def test_native_latents_are_not_sent_to_peers(model: Path) -> None:
    async def main() -> None:
        async with instance(model, Role.DECODE, **OVER_HCCS) as on_npu:
            with pytest.raises(InvalidRequest, match="send the request to a prefill instance, or"):
                await ask(on_npu, (1, 2, 3), replace(FEW, max_tokens=1), ORDER)

    asyncio.run(main())
