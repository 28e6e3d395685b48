"""Contiguous runs: moving pieces as whole runs puts every byte where its piece says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mooncake_hal.transport import Spans
from mooncake_hal_ascend.hccs.contiguous_runs import ContiguousRuns, find_runs, row_bytes, rows_of

BASE, REMOTE = 1 << 40, 1 << 30


def stripes(num_blocks: int, tokens: int, piece: int, ranks: int, mine: int) -> Spans:
    """A rank's blocks: dense and permuted at the peer, a stripe per token of wider blocks here."""
    block, token = np.divmod(np.arange(num_blocks * tokens, dtype=np.uint64), np.uint64(tokens))
    there = (block * np.uint64(7) % np.uint64(num_blocks)) * np.uint64(tokens * piece)
    here = (block * np.uint64(tokens) + token) * np.uint64(ranks * piece) + np.uint64(mine * piece)
    sizes = np.full(len(block), piece, np.uint64)
    return Spans(
        here + np.uint64(BASE), there + token * np.uint64(piece) + np.uint64(REMOTE), sizes
    )


def found(spans: Spans, max_bytes: int) -> ContiguousRuns | None:
    return find_runs(spans.remote, spans.local, spans.nbytes, BASE, max_bytes)


def carry_out(runs: ContiguousRuns, buffer_bytes: int, there: np.ndarray, here: np.ndarray) -> None:
    """Move the runs to a buffer and scatter their rows, in memory."""
    for batch in runs.batches(buffer_bytes):
        buffer = np.zeros(buffer_bytes, np.uint8)
        for at, start, size in zip(batch.in_buffer(0), batch.starts, batch.run_bytes, strict=True):
            begin = int(start) - REMOTE
            buffer[int(at) : int(at + size)] = there[begin : begin + int(size)]
        row = row_bytes(batch.targets, batch.sizes, BASE)
        targets = rows_of(batch.targets, batch.sizes, BASE, row)
        here.reshape(-1, row)[targets] = buffer[: len(targets) * row].reshape(-1, row)


@given(
    num_blocks=st.sampled_from([1, 2, 3, 5]),
    tokens=st.sampled_from([16, 128]),
    piece=st.sampled_from([32, 96, 256, 512]),
    ranks=st.integers(2, 4),
    data=st.data(),
)
def test_runs_move_every_byte_to_its_pieces_address(
    num_blocks: int, tokens: int, piece: int, ranks: int, data: st.DataObject
) -> None:
    mine = data.draw(st.integers(0, ranks - 1))
    spans = stripes(num_blocks, tokens, piece, ranks, mine)
    buffer_bytes = data.draw(st.sampled_from([piece, 3 * piece, 4096, 1 << 20]))
    runs = found(spans, max(buffer_bytes, piece))
    assert runs is not None
    there = np.random.default_rng(0).integers(0, 256, num_blocks * tokens * piece, np.uint8)
    here = np.zeros(num_blocks * tokens * ranks * piece, np.uint8)
    wanted = here.copy()
    for local, remote, size in zip(spans.local, spans.remote, spans.nbytes, strict=True):
        to, at = int(local) - BASE, int(remote) - REMOTE
        wanted[to : to + int(size)] = there[at : at + int(size)]
    carry_out(runs, max(buffer_bytes, piece), there, here)
    assert (here == wanted).all()


def test_block_is_one_run() -> None:
    runs = found(stripes(1, 128, 256, 2, 1), 1 << 20)
    assert runs is not None
    [batch] = runs.batches(1 << 20)
    assert batch.run_bytes.tolist() == [128 * 256]
    assert row_bytes(batch.targets, batch.sizes, BASE) == 256


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        (stripes(4, 128, 32 << 10, 2, 0), "large pieces are worth their own transfer"),
        (stripes(64, 4, 256, 2, 0), "runs of four pieces hardly help"),
        (stripes(4, 128, 24, 2, 1), "rows of 24 bytes are slow to scatter"),
        (stripes(4, 128, 50, 2, 1), "rows of 50 bytes are no whole elements"),
        (stripes(1, 128, 8192, 2, 0), "a piece that is larger than the buffer"),
    ],
)
def test_unsuitable_pieces_have_no_runs(spans: Spans, why: str) -> None:
    assert found(spans, 4096) is None, why
