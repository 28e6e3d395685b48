"""A whole engine with the KVCache pool gives the tokens of an engine without it."""

import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support.checkpoints import random_model, write_checkpoint
from support.core_runs import random_prompt
from support.pool_engine import CHUNK, POOL, SETTINGS, ask, engine, forget, two_turns
from support.store_process import SECRET, StoreProcess

from mooncake_engine.errors import ConfigError, EngineDead
from mooncake_engine.models.catalog import kv_geometry, read_model_config
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling import pool_loads
from mooncake_hal.errors import TransferError
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import ConnectorDead, Fatal, StoreIOError
from mooncake_kv.pool import pool_stores
from mooncake_kv.pool.pool_worker import PoolWorker, _RunningLoad
from mooncake_kv.pool.step_progress import StepProgress
from mooncake_kv.store import ssd_records
from mooncake_kv.store.node_store import NodeStore
from mooncake_kv.store.ssd_config import SsdDirectoryConfig
from mooncake_kv.store.ssd_directory import SsdDirectory
from mooncake_kv.store.ssd_sections import section_checksums

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(random_model("llama"), tmp_path_factory.mktemp("llama"))


def test_next_turn_loads_prompt_and_answer(model, monkeypatch):
    with engine(model, None) as core:
        plain, _ = two_turns(core)
    with engine(model) as core:
        pooled, num_cached = two_turns(core)
        stats = core.report().stats.kv_pool
        monkeypatch.setattr(pool_stores, "STATS_AGE_S", 0.0)
        store = core.report().stats.pool_store
    assert (store.num_puts, store.num_dram_hits) == (stats.num_saved_chunks, 7)
    assert pooled == plain
    assert num_cached == (200 + 39) // CHUNK * CHUNK
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)
    assert stats.num_found_chunks == {"dram": 7}
    assert (stats.num_stores, stats.num_connected_stores) == (1, 1)
    others = dict.fromkeys(stats.loaded_bytes_by_transport.keys() - {"shm"}, 0)
    assert "tcp" in others  # from 0 on: it may be used
    assert stats.loaded_bytes_by_transport == others | {"shm": stats.loaded_bytes}
    assert stats.saved_bytes_by_transport == others | {"shm": stats.saved_bytes}


@pytest.mark.parametrize("length", [CHUNK, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 5])
def test_prompts_of_whole_and_partial_chunks(model, length):
    prompt = random_prompt(3, length)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with engine(model) as core:
        first, _ = ask(core, [prompt], sampling)
        forget(core)
        again, cached = ask(core, [prompt], sampling)
    assert again == first
    assert cached == [(length - 1) // CHUNK * CHUNK]


def test_chunk_size_that_splits_blocks_is_rejected(model):
    refused = pytest.raises(ConfigError, match="chunk has 24 tokens, which is no multiple of")
    with refused, engine(model, f"{POOL.partition(',')[0]},chunk=24"):
        pass


def test_layer_is_saved_while_later_layers_are_computed(model, monkeypatch):
    """The write of a computed layer completes before the step computes its last layer."""
    written, waited = threading.Event(), []
    start, num_layers = PoolWorker._start, 3

    def start_and_record(self, plans, layers, moves, *, is_read):
        transfers = start(self, plans, layers, moves, is_read=is_read)
        for transfer in transfers:
            transfer.wait()
        if layers == (0, 1) and not is_read:
            written.set()
        return transfers

    begin = StepProgress.begin

    def begin_and_wait(self, number):
        layer_done = begin(self, number)

        def done(layer):
            if layer == num_layers - 1:
                waited.append(written.wait(20))
            layer_done(layer)

        return done

    monkeypatch.setattr(PoolWorker, "_start", start_and_record)
    monkeypatch.setattr(StepProgress, "begin", begin_and_wait)
    prompt = random_prompt(5, 4 * CHUNK)
    with engine(model) as core:
        ask(core, [prompt], ONE)
        stats = core.report().stats.kv_pool
    assert waited == [True]
    assert (stats.num_saved_chunks, stats.num_saves, stats.num_layerwise_saves) == (4, 1, 1)


def test_step_started_before_any_layer_waits_for_first_layer(model, monkeypatch):
    """No byte is read before the step needs the first layer; its tokens are right nevertheless."""
    with engine(model, None) as core:
        plain, _ = two_turns(core)
    begun, start = [], PoolWorker._start

    def start_late(self, plans, layers, moves, *, is_read):
        if is_read and not begun:
            deadline = time.monotonic() + 20
            while not moves._awaited and time.monotonic() < deadline:
                time.sleep(0.001)
            begun.append(dict(moves._awaited))
        return start(self, plans, layers, moves, is_read=is_read)

    monkeypatch.setattr(PoolWorker, "_start", start_late)
    release_at_once(monkeypatch)
    with engine(model) as core:
        pooled, _ = two_turns(core)
        stats = core.report().stats.kv_pool
    assert [list(awaited) for awaited in begun] == [[1]], "the step waits for the first layer"
    assert pooled == plain
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)
    assert stats.stalled_seconds > 0


def release_at_once(monkeypatch):
    """Release loads before any layer has arrived, with timeouts that suit a busy machine."""
    monkeypatch.setattr(pool_loads, "layers_before_release", lambda *_: 0)
    monkeypatch.setattr(pool_loads, "MIN_TIMEOUT_S", 60.0)


def test_step_continues_and_engine_dies_if_load_cannot_complete(model, monkeypatch):
    with engine(model) as core:
        two_turns(core)
        forget(core)
        start = PoolWorker._start

        def fail(self, plans, layers, moves, *, is_read):
            if is_read:
                raise TransferError("the link is down")
            return start(self, plans, layers, moves, is_read=is_read)

        def stay(self):
            raise ConnectorDead(Fatal.MEMORY_MAY_CHANGE, "the link does not answer")

        monkeypatch.setattr(PoolWorker, "_start", fail)
        monkeypatch.setattr(_RunningLoad, "drain", stay)
        release_at_once(monkeypatch)
        with pytest.raises(EngineDead, match="the link does not answer"):
            ask(core, [random_prompt(1, 200)])


def test_first_layer_is_loaded_before_ssd_reads_other_layers(model, monkeypatch, tmp_path):
    """An SSD returns the first layer of all chunks, and data of other layers only once a rank has
    the first."""
    first_layer, num_read, seen = threading.Event(), [], []
    read, arrived = SsdDirectory.read_sections, _RunningLoad.arrived

    def read_late(directory, location, start, payload, section):
        if start > ssd_records.PAGE:
            assert first_layer.wait(20)
            num_read.append(start)
        return read(directory, location, start, payload, section)

    def tell(self, stop):
        if stop == 1:
            seen.append(len(num_read))
            first_layer.set()
        arrived(self, stop)

    with engine_with_prompt_on_ssd(model, monkeypatch, tmp_path) as (core, prompt, plain):
        before = core.report().stats.kv_pool
        monkeypatch.setattr(SsdDirectory, "read_sections", read_late)
        monkeypatch.setattr(_RunningLoad, "arrived", tell)
        pooled, cached = ask(core, [prompt], ONE)
        stats = core.report().stats.kv_pool.since(before)
    assert (pooled, cached) == (plain, [4 * CHUNK])
    assert seen[:1] == [0]
    assert len(num_read) >= 4
    assert stats.num_found_chunks["ssd"] == 4
    assert (stats.num_loads, stats.num_failed_loads) == (1, 0)


@pytest.mark.parametrize("fault", ["flipped", "refused"])
def test_step_output_is_dropped_when_later_layer_fails(model, monkeypatch, tmp_path, fault):
    """The step has computed a layer on loaded data before the SSD fails."""
    has_computed, faults = threading.Event(), []
    read, wait_for = SsdDirectory.read_sections, _RunningLoad.wait_for

    def read_wrong(directory, location, start, payload, section):
        if start > ssd_records.PAGE:
            assert has_computed.wait(20)
        checksums = read(directory, location, start, payload, section)
        if start > ssd_records.PAGE and not faults:
            faults.append(start)
            if fault == "refused":
                raise StoreIOError("an input/output error")
            payload[0] ^= 1
            return section_checksums(payload, section)
        return checksums

    def tell(self, layer):
        if layer:
            has_computed.set()
        wait_for(self, layer)

    with engine_with_prompt_on_ssd(model, monkeypatch, tmp_path) as (core, prompt, plain):
        before = core.report().stats.kv_pool
        release_at_once(monkeypatch)
        monkeypatch.setattr(SsdDirectory, "read_sections", read_wrong)
        monkeypatch.setattr(_RunningLoad, "wait_for", tell)
        pooled, _ = ask(core, [prompt], ONE)
        stats = core.report().stats.kv_pool.since(before)
    assert pooled == plain
    assert len(faults) == 1
    assert (stats.num_loads, stats.num_failed_loads, stats.num_loaded_chunks) == (1, 1, 0)


@contextmanager
def engine_with_prompt_on_ssd(model, monkeypatch, tmp_path):
    """An engine whose store holds a prompt of four chunks and a token on its SSD only; the prompt,
    and its answer."""
    stores = small_drives(monkeypatch)
    prompt, other = random_prompt(5, 4 * CHUNK + 1), random_prompt(6, 4 * CHUNK + 1)
    chunk_bytes = kv_geometry(read_model_config(model), torch.float32).token_bytes * CHUNK
    drive = f"dram={4 * chunk_bytes},ssd={tmp_path}:4MiB,{SETTINGS}"
    with engine(model, drive) as core:
        plain, _ = ask(core, [prompt], ONE)
        forget(core)
        ask(core, [prompt], ONE)  # the second use: it is copied to the SSD
        await_chunks_on_ssd(stores[0], 4)
        ask(core, [other], ONE)
        forget(core)
        yield core, prompt, plain


def small_drives(monkeypatch):
    """Use sections and segments that suit a small model; returns the stores opened from now on."""
    stores = []
    for name in ("MIN_SECTION_BYTES", "MIN_PART_BYTES"):
        monkeypatch.setattr(ssd_records, name, ssd_records.PAGE)
    small = partial(SsdDirectoryConfig, segment_bytes=1 << 20, min_free_bytes=0)
    monkeypatch.setattr(pool_stores, "SsdDirectoryConfig", small)

    def open_store(config, **more):
        stores.append(NodeStore(config, **more))
        return stores[-1]

    monkeypatch.setattr(pool_stores, "NodeStore", open_store)
    return stores


def await_chunks_on_ssd(store, count):
    deadline = time.monotonic() + 30
    while store.stats().ssd_chunks < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_chunks_of_other_store_are_copied_while_own_store_has_space(model, tmp_path):
    """A prompt is loaded from the other store once, and from the own one after that."""
    prompts = [random_prompt(seed, 4 * CHUNK + 1) for seed in (7, 8)]
    chunk_bytes = kv_geometry(read_model_config(model), torch.float32).token_bytes * CHUNK
    store = StoreProcess(tmp_path, "--dram", "64M")
    try:
        network = KVTransferConfig(secret=SECRET)
        elsewhere = f"connect=127.0.0.1:{store.port},{SETTINGS}"
        with engine(model, elsewhere, network) as core:
            plain = [ask(core, [prompt], ONE)[0] for prompt in prompts]
        with engine(model, f"dram={5 * chunk_bytes},{elsewhere}", network) as core:
            found = []
            for prompt in (prompts[0], prompts[0], prompts[1], prompts[0]):
                answers, cached = ask(core, [prompt], ONE)
                assert (answers, cached) == (plain[prompts.index(prompt)], [4 * CHUNK])
                forget(core)
                found.append(dict(core.report().stats.kv_pool.num_found_chunks))
            stats = core.report().stats.kv_pool
    finally:
        store.end()
    assert found[0] == {"remote_dram": 4}
    assert found[1] == {"remote_dram": 4, "dram": 4}
    assert stats.num_copied_chunks >= 4
    assert stats.num_failed_loads == 0
