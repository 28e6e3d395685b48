"""The pool changes no token: models, KV types, ranks, speculation, preemption, several choices."""

import pytest
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt, serve_all
from support.pool_engine import CHUNK, GREEDY, SETTINGS, ask, engine, forget, settle, two_turns
from support.store_process import SECRET, StoreProcess

from mooncake_engine.messages import EngineRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_kv.config import KVTransferConfig

NGRAM = SpeculativeConfig(SpeculativeMethod.NGRAM, prompt_lookup_min=1)
SEEDED = SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = write_checkpoint(random_model(family), tmp_path_factory.mktemp(family))
        return made[family]

    return make


def _compare(model, **options):
    with engine(model, None, **options) as core:
        plain, _ = two_turns(core)
    with engine(model, **options) as core:
        pooled, num_cached = two_turns(core)
        stats = core.report().stats.kv_pool
        core.check_integrity()
    assert pooled == plain
    assert stats.num_failed_loads == 0
    assert num_cached >= 200 // CHUNK * CHUNK


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_models(models, family):
    _compare(models(family))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 48},
        {"block_size": 8, "kv_layout": "BHLPT"},
        {"speculative_config": NGRAM},
        {"speculative_config": NGRAM, "async_scheduling": True},
    ],
    ids=" ".join,
)
def test_settings(models, options):
    _compare(models("llama"), **options)


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [("qwen3_moe", 1), ("deepseek_v3", 2)],
)
def test_data_parallel_rank_loads_what_another_saved(models, family, tp_size):
    """The ranks also share experts: one computes while the other waits for layers."""
    first, other = random_prompt(11, 200), random_prompt(12, 90)
    with engine(models(family), None) as core:
        plain = [_on_ranks(core, {0: prompt}) for prompt in (first, other, other, first)]
    divided = {"dp_size": 2, "tp_size": tp_size, "ep_size": 2, "ep_dispatch_min_tokens": 20}
    with engine(models(family), **divided) as core:
        pooled = _on_ranks(core, {0: first, 1: other})
        settle(core)
        forget(core)
        swapped = _on_ranks(core, {0: other, 1: first})
        by_rank = [rank.kv_pool.num_loaded_chunks for rank in core.report().stats.by_dp_rank]
        total = core.report().stats.kv_pool
        core.check_integrity()
    assert [*pooled, *swapped] == [answer for answers in plain for answer in answers]
    assert by_rank == [90 // CHUNK, 200 // CHUNK]
    assert (total.num_loaded_chunks, total.num_failed_loads) == (sum(by_rank), 0)


def _on_ranks(core, prompts):
    """Concurrent answers to one prompt on each of these ranks."""
    requests = [
        EngineRequest(f"r{rank}", prompt, GREEDY, data_parallel_rank=rank)
        for rank, prompt in prompts.items()
    ]
    answers = serve_all(core, requests).answers
    return [answers[request.request_id] for request in requests]


def test_several_choices_of_one_prompt(models):
    """Choices share the prefix that one of them has loaded."""
    prompt = random_prompt(4, 150)
    with engine(models("llama"), None, seed=5) as core:
        plain = [ask(core, [prompt], SEEDED, n=3)[0] for _ in range(2)]
    with engine(models("llama"), seed=5) as core:
        first, _ = ask(core, [prompt], SEEDED, n=3)
        forget(core)
        second, cached = ask(core, [prompt], SEEDED, n=3)
        assert core.report().stats.kv_pool.num_loads == 1
    assert [first, second] == plain
    assert max(cached) == 150 // CHUNK * CHUNK


def test_preemption_during_loads(models):
    """Requests are preempted while others load."""
    prompts = [random_prompt(seed, 90) for seed in range(5)]
    few = {"num_kv_blocks": 22, "max_model_len": 300}
    with engine(models("llama"), None, **few) as core:
        plain, _ = ask(core, prompts)
    with engine(models("llama"), **few) as core:
        first, _ = ask(core, prompts)
        forget(core)
        again, _ = ask(core, prompts)
        stats = core.report().stats
    assert first == again == plain
    assert stats.num_preemptions > 0
    assert stats.kv_pool.num_loaded_chunks > 0


@pytest.mark.timeout(400)
def test_ranks_and_stages_read_chunks_of_other_shapes(models, tmp_path):
    """A writer of one shape and a reader of another, each over one store, in both directions."""
    shapes = [{}, {"tp_size": 2, "block_size": 8}, {"pp_size": 2}]
    store = StoreProcess(tmp_path, "--dram", "64M")
    pool = f"connect=127.0.0.1:{store.port},{SETTINGS}"
    network = KVTransferConfig(secret=SECRET)
    prompt = random_prompt(6, 170)
    try:
        answers, loaded = [], []
        for shape in shapes:
            with engine(models("llama"), pool, network=network, **shape) as core:
                (answer,), (num_cached,) = ask(core, [prompt])
                own = random_prompt(20 + len(answers), 100)
                ask(core, [own])
            with engine(models("llama"), pool, network=network) as core:
                loaded.append((num_cached, ask(core, [own])[1][0]))
            answers.append(answer)
    finally:
        store.end()
    assert answers == [answers[0]] * 3
    assert loaded == [(0, 96), (160, 96), (160, 96)]
