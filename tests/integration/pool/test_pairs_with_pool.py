"""Prefill and decode instances that share a store.

In the next turn of a conversation, P loads what D has written, whichever flow moves the KV to D.
"""

import asyncio

import pytest
from support.pd import GREEDY, ask, instance, prompt_of, wait_until, write_model
from support.pool_engine import CHUNK, SETTINGS
from support.push import WAYS
from support.store_process import SECRET, StoreProcess

from mooncake_kv.store.store_client import StoreClient

NUM_ASKED = 120
"""Tokens of a prompt whose answer of 12 tokens completes a chunk."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path):
    store = StoreProcess(tmp_path, "--dram", "64M")
    yield store
    store.end()


async def _conversation(answer_of, turns=3):
    """Tokens of several turns."""
    prompt, answers = prompt_of(NUM_ASKED), []
    for turn in range(turns):
        answer = await answer_of(prompt)
        answers.append(answer.tokens)
        prompt = (*prompt, *answer.tokens, *prompt_of(25, seed=turn + 7))
    return answers


async def _plain(model):
    async with instance(model) as alone:
        return await _conversation(lambda prompt: ask(alone, prompt, GREEDY))


async def _until_saved(of, num_chunks):
    """Wait until both instances together have saved this many chunks."""

    def saved():
        stats = [one.engine.stats().kv_pool for one in (of.prefill, of.decode)]
        return sum(one.num_saved_chunks for one in stats)

    await wait_until(lambda: saved() == num_chunks, 20, lambda: f"{saved()} of {num_chunks}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["pulled", "pulled early", "pushed"])
def test_prompt_sent_once_counts_as_one_use_from_either_instance(model, tmp_path, way):
    """So SSDs get only chunks that are requested again."""
    make_pair, ask_both = WAYS[way]
    (tmp_path / "ssd").mkdir()
    store = StoreProcess(tmp_path, "--dram", "64M", "--ssd", f"{tmp_path / 'ssd'}:64M")
    prompts = [prompt_of(NUM_ASKED, seed=seed + 3) for seed in range(3)]
    num_chunks = len(prompts) * (NUM_ASKED + GREEDY.max_tokens - 1) // CHUNK

    async def run():
        options = {"kv_pool": f"connect=127.0.0.1:{store.port},{SETTINGS}", "secret": SECRET}
        async with make_pair(model, **options) as both:
            client = StoreClient(store.address, "test")
            assert client.await_store(60)

            def is_saved():
                instances = both.prefill, both.decode
                return not any(one.engine.stats().kv_pool.saves_in_flight for one in instances)

            async def ask_all():
                for prompt in prompts:
                    await ask_both(both, prompt, GREEDY)
                await both.check_clean()
                await wait_until(is_saved, 20)

            def stats():
                return client.stats().result(60)

            try:
                await ask_all()
                assert stats().num_puts == num_chunks
                assert stats().num_ssd_skipped == {"first_touch": num_chunks}
                assert stats().ssd_chunks == 0
                await ask_all()
                await wait_until(lambda: stats().ssd_chunks == num_chunks, 20, stats)
            finally:
                client.close()

    try:
        asyncio.run(run())
    finally:
        store.end()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("way", "tp"),
    [
        ("pulled", (1, 1)),
        ("pulled", (1, 2)),
        ("pulled", (2, 1)),
        pytest.param("pulled", (2, 2), marks=pytest.mark.slow),
        ("pulled early", (1, 1)),
        ("pushed", (1, 1)),
        pytest.param("pushed", (1, 2), marks=pytest.mark.slow),
        pytest.param("pushed", (2, 1), marks=pytest.mark.slow),
        ("pushed", (2, 2)),
    ],
)
def test_chunks_saved_by_one_of_a_pair_are_loaded_by_the_other(model, store, way, tp):
    make_pair, ask_both = WAYS[way]

    async def run():
        plain = await _plain(model)
        options = {
            "kv_pool": f"connect=127.0.0.1:{store.port},{SETTINGS}",
            "secret": SECRET,
            "prefix_caching": False,  # so that only the pool holds the KV
        }
        roles = {"prefill": {"tp_size": tp[0]}, "decode": {"tp_size": tp[1]}}
        async with make_pair(model, **roles, **options) as both:

            async def answer_of(prompt):
                answer = await ask_both(both, prompt, GREEDY)
                await _until_saved(both, (len(prompt) + len(answer.tokens) - 1) // CHUNK)
                return answer

            assert await _conversation(answer_of) == plain
            prefill = both.prefill.engine.stats().kv_pool
            decode = both.decode.engine.stats().kv_pool
            assert (prefill.num_loads, prefill.num_failed_loads) == (2, 0)
            assert prefill.num_loaded_chunks == 131 // CHUNK + 168 // CHUNK
            # Two chunks are completed by answers, which only D knows. Those of the prompt are saved
            # once, by the first instance that has them (that is the sum above): with a push, this
            # may be D.
            assert decode.num_saved_chunks >= 2
            await both.check_clean()

    asyncio.run(run())
