"""Runs: chunks that are planned and moved together."""

from __future__ import annotations

from mooncake_kv.pool.pool_messages import ChunkRun, PlacedChunk, consecutive_runs


def test_consecutive_chunks_in_one_store_are_one_run() -> None:
    chunks = [
        PlacedChunk("a", 3, 0),
        PlacedChunk("a", 4, 8192),
        PlacedChunk("b", 5, 4096),  # another store
        PlacedChunk("a", 6, 4096),
        PlacedChunk("a", 8, 12288),  # one is missing
        PlacedChunk("a", 9, 0),
    ]
    assert consecutive_runs(chunks, skipped_tokens=5) == [
        ChunkRun("a", 3, (0, 8192), 5),
        ChunkRun("b", 5, (4096,)),
        ChunkRun("a", 6, (4096,)),
        ChunkRun("a", 8, (12288, 0)),
    ]


def test_no_chunks_are_no_runs() -> None:
    assert consecutive_runs([], skipped_tokens=5) == []
