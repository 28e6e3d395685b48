"""A whole engine that keeps KV in the pool: the tokens of one that does not."""

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt
from support.pool_engine import CHUNK, POOL, ask, engine, forget, two_turns

from mooncake_engine.errors import ConfigError
from mooncake_engine.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("always_loads")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def test_the_next_turn_of_a_conversation_loads_prompt_and_answer(model):
    with engine(model, None) as core:
        plain, _ = two_turns(core)
    with engine(model) as core:
        pooled, num_cached = two_turns(core)
        stats = core.stats().kv_pool
    assert pooled == plain
    assert num_cached == (200 + 39) // CHUNK * CHUNK
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)
    assert stats.num_found_chunks == {"dram": 7}


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 5])
def test_a_prompt_of_whole_chunks_and_others(model, length):
    prompt = random_prompt(3, length)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with engine(model) as core:
        first, _ = ask(core, [prompt], sampling)
        forget(core)
        again, cached = ask(core, [prompt], sampling)
    assert again == first
    assert cached == [(length - 1) // CHUNK * CHUNK]


def test_chunks_that_are_no_whole_blocks_are_refused(model):
    refused = pytest.raises(ConfigError, match="chunk has 24 tokens, which are no whole blocks")
    with refused, engine(model, f"{POOL.partition(',')[0]},chunk=24"):
        pass
