"""Stored chunks written by a rank of any split, block size and layout can be read by every
other."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from mooncake_hal.errors import CapabilityError, PlanError
from mooncake_hal.kv.geometry import AttentionKind, KVGeometry, KVGroup, shards_of
from mooncake_hal.kv.layout import layout_bytes, make_layout
from mooncake_hal.kv.transfer_plan import KVShardSpec
from mooncake_kv.store.arena_allocator import rounded_up
from mooncake_kv.store.chunk_layout import (
    ChunkTransfer,
    LayerPlans,
    chunk_bytes,
    stored_layout,
    writes_for_its_replicas,
)

GQA = KVGeometry(AttentionKind.GQA, 3, 4, (8, 8), "float16", 2)
MLA = KVGeometry(AttentionKind.MLA, 3, 1, (16, 4), "bfloat16", 2)
PIECES = KVGeometry(AttentionKind.GQA, 3, 4, (8 * 16, 8 * 16), "float16", 2, 16, "pages of 16")
"""vLLM's CPU layout: 16 tokens of a head are contiguous, in their own order."""
CHUNK = 32
NUM_CHUNKS = 3


class Ranks:
    """An instance's KV memory, filled or empty, with a block table."""

    def __init__(self, geometry, tp, pp, block_size, layout, *, seed=None):
        self.geometry = geometry
        random = np.random.default_rng(7)
        num_blocks = NUM_CHUNKS * CHUNK // block_size + 3
        self.blocks = list(map(int, random.permutation(num_blocks)))[: num_blocks - 3]
        self.memories, self.specs = [], []
        for shard in shards_of(geometry, tp, pp):
            memory = np.zeros(layout_bytes(geometry, shard, num_blocks, block_size), np.uint8)
            laid_out = make_layout(layout, geometry, shard, num_blocks, block_size)
            self.specs.append(KVShardSpec(shard, laid_out.shifted(memory.ctypes.data)))
            self.memories.append(memory)
        if seed is not None:
            self._fill(seed, block_size)

    def _fill(self, seed, block_size):
        for spec in self.specs:
            for token, layer, head, plane, address in self._elements(spec, block_size):
                width = self.geometry.plane_dims[plane] * self.geometry.element_bytes
                value = hash((seed, token, layer, head, plane)) & 0xFF
                ctypes.memset(address, value, width)

    def values(self, block_size):
        """The first byte of every (token, layer, head, plane) that any rank holds."""
        return {
            (token, layer, head, plane): ctypes.string_at(address, 1)
            for spec in self.specs
            for token, layer, head, plane, address in self._elements(spec, block_size)
        }

    def _elements(self, spec, block_size):
        shard, layout = spec.shard, spec.layout
        for token in range(NUM_CHUNKS * CHUNK):
            block, within = self.blocks[token // block_size], token % block_size
            for plane in range(self.geometry.planes):
                at = block * layout.block_strides[plane] + within * layout.token_strides[plane]
                for layer in range(shard.layers):
                    for head in range(shard.heads):
                        address = layout.bases[plane][layer] + at
                        address += head * layout.head_strides[plane]
                        yield (
                            token,
                            shard.layer_start + layer,
                            shard.head_start + head,
                            plane,
                            address,
                        )


def plan_chunks(geometry, local, stored, transfer, layers=None):
    """The spans of some layers, planned by themselves; None: of all."""
    return LayerPlans(geometry, local, stored, transfer).spans(layers or (0, geometry.layers))


def move(spans, *, to_store):
    for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
        to, source = (remote, local) if to_store else (local, remote)
        ctypes.memmove(int(to), int(source), int(nbytes))


WRITERS = [(1, 1, 16, "LPBHT"), (2, 1, 8, "LPBTH"), (4, 3, 32, "BHLPT")]
READERS = [(1, 1, 4, "BHLPT"), (2, 2, 16, "LPBTH"), (3, 1, 16, "LPBHT")]


@pytest.mark.parametrize("geometry", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_any_rank_reads_what_any_other_wrote(geometry, writer, reader):
    step = rounded_up(chunk_bytes(geometry, CHUNK))
    arena = np.zeros(step * (NUM_CHUNKS + 2), np.uint8)
    stored = stored_layout(geometry, CHUNK, arena.ctypes.data, arena.nbytes)
    offsets = [step * number for number in (3, 0, 4)]
    source = Ranks(geometry, *writer, seed=5)
    for spec in source.specs:
        if writes_for_its_replicas(spec.shard, spread=1):
            transfer = ChunkTransfer(0, offsets, source.blocks)
            move(plan_chunks(geometry, spec, stored, transfer), to_store=True)
    target = Ranks(geometry, *reader)
    for spec in target.specs:
        for layer in range(geometry.layers):  # as in a layer-wise load
            transfer = ChunkTransfer(0, offsets, target.blocks)
            spans = plan_chunks(geometry, spec, stored, transfer, (layer, layer + 1))
            move(spans, to_store=False)
    assert target.values(reader[2]) == source.values(writer[2])


@pytest.mark.parametrize("geometry", [GQA, MLA, PIECES], ids=["gqa", "mla", "pieces"])
@pytest.mark.parametrize("layout", ["LPBHT", "BHLPT"])
def test_only_the_chunk_is_written(geometry, layout):
    """Every byte of the chunks is written, and none of their neighbours'."""
    step = rounded_up(chunk_bytes(geometry, CHUNK))
    arena = np.zeros(step * 6, np.uint8)
    stored = stored_layout(geometry, CHUNK, arena.ctypes.data, arena.nbytes)
    for shard in shards_of(geometry, 2):
        laid_out = make_layout(layout, geometry, shard, 4, CHUNK)
        memory = np.full(layout_bytes(geometry, shard, 4, CHUNK), 0xAB, np.uint8)
        spec = KVShardSpec(shard, laid_out.shifted(memory.ctypes.data))
        transfer = ChunkTransfer(0, [step * 4, step], [2, 0])
        if writes_for_its_replicas(shard, spread=1):
            move(plan_chunks(geometry, spec, stored, transfer), to_store=True)
    written = np.zeros_like(arena)
    for offset in (step * 4, step):
        written[offset : offset + chunk_bytes(geometry, CHUNK)] = 0xAB
    assert np.array_equal(arena, written)


def test_chunk_of_partial_pieces_is_rejected():
    with pytest.raises(
        CapabilityError, match="blocks of 40 tokens are not a multiple of units of 16 tokens"
    ):
        stored_layout(PIECES, 40, 1 << 20, 1 << 20)


def test_chunks_from_mid_sequence_do_not_change_the_rest():
    step = rounded_up(chunk_bytes(GQA, CHUNK))
    arena = np.full(step, 0xAB, np.uint8)
    stored = stored_layout(GQA, CHUNK, arena.ctypes.data, arena.nbytes)
    ranks = Ranks(GQA, 1, 1, 16, "LPBHT")
    spans = plan_chunks(GQA, ranks.specs[0], stored, ChunkTransfer(1, [0], ranks.blocks))
    assert spans.total_bytes == chunk_bytes(GQA, CHUNK)
    move(spans, to_store=False)
    for (token, *_), value in ranks.values(16).items():
        assert value == (b"\xab" if token // CHUNK == 1 else b"\0")


@pytest.mark.parametrize("geometry", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("is_apart", [False, True], ids=["alike", "apart"])
def test_shifted_layer_plans_equal_plans_of_single_layers(geometry, reader, is_apart):
    step = rounded_up(chunk_bytes(geometry, CHUNK))
    stored = stored_layout(geometry, CHUNK, 1 << 20, step * (NUM_CHUNKS + 2))
    ranks = Ranks(geometry, *reader)
    transfer = ChunkTransfer(1, [step * 3, 0], ranks.blocks, skipped_tokens=5)
    for spec in ranks.specs:
        layout = spec.layout
        if is_apart:  # one allocation per layer and plane, later ones before others
            bases = tuple(
                tuple(base + (1 << 40) - plane * (1 << 33) - layer**2 * (1 << 32)
                      for layer, base in enumerate(of_plane))
                for plane, of_plane in enumerate(layout.bases)
            )  # fmt: skip
            layout = replace(layout, bases=bases)
        rank = KVShardSpec(spec.shard, layout)
        plans = LayerPlans(geometry, rank, stored, transfer)
        groups = [(n, n + 1) for n in range(spec.shard.layer_start, spec.shard.layer_stop)]
        if spec.shard.layers == 3:
            groups += [(0, 2), (1, 3)]
        for layers in groups:
            found = plans.spans(layers)
            wanted = plan_chunks(geometry, rank, stored, transfer, layers)
            for name in ("local", "remote", "nbytes"):
                assert np.array_equal(getattr(found, name), getattr(wanted, name))


@pytest.mark.parametrize("step", [1, 2, 3], ids=lambda step: f"{step} layers at once")
@pytest.mark.parametrize("first_chunk", [0, 2], ids=["from the start", "the last chunk"])
def test_groups_read_their_windows_from_chunks_that_ranks_without_groups_wrote(first_chunk, step):
    """A window of 40 tokens before token 96 begins at token 57, in the block that starts at 48."""
    size = rounded_up(chunk_bytes(GQA, CHUNK))
    arena = np.zeros(size * NUM_CHUNKS, np.uint8)
    stored = stored_layout(GQA, CHUNK, arena.ctypes.data, arena.nbytes)
    offsets = [size * number for number in (2, 0, 1)]
    writer, reader = Ranks(GQA, 2, 1, 8, "LPBTH", seed=5), Ranks(GQA, 1, 1, 16, "BHLPT")
    for spec in writer.specs:
        transfer = ChunkTransfer(0, offsets, writer.blocks)
        move(plan_chunks(GQA, spec, stored, transfer), to_store=True)
    geometry = replace(GQA, groups=(KVGroup((1,)), KVGroup((0, 2), window=40)))
    table = [block for block in reader.blocks for _ in geometry.groups]
    transfer = ChunkTransfer(first_chunk, offsets[first_chunk:], table, window_stop=96)
    plans = LayerPlans(geometry, reader.specs[0], stored, transfer)
    for start in range(0, geometry.layers, step):
        move(plans.spans((start, min(start + step, geometry.layers))), to_store=False)
    wanted = writer.values(8)
    for (token, layer, head, plane), value in reader.values(16).items():
        is_read = token >= max(first_chunk * CHUNK, 0 if layer == 1 else 48)
        assert value == (wanted[token, layer, head, plane] if is_read else b"\0")


def test_one_of_the_ranks_with_same_data_writes():
    for geometry, tp in ((MLA, 4), (GQA, 8)):
        shards = shards_of(geometry, tp)
        writers = [shard for shard in shards if writes_for_its_replicas(shard, spread=6)]
        assert len({(s.head_start, s.head_stop) for s in writers}) == len(writers)
        assert {h for s in writers for h in range(s.head_start, s.head_stop)} == set(
            range(geometry.kv_heads)
        )


def test_offset_outside_the_arena_is_rejected():
    step = rounded_up(chunk_bytes(GQA, CHUNK))
    stored = stored_layout(GQA, CHUNK, 1 << 20, step)
    ranks = Ranks(GQA, 1, 1, 16, "LPBHT")
    with pytest.raises(PlanError, match="is not in a pool"):
        plan_chunks(GQA, ranks.specs[0], stored, ChunkTransfer(0, [step], ranks.blocks))
