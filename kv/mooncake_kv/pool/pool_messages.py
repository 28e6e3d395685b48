"""Messages between an instance's pool client and its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import msgspec

from mooncake_hal.session.processes import ProcessName


class ConnectStore(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: where a store's memory is, before any order that names its epoch.

    Args:
        epoch: of the store.
        address, nbytes: its arena, in its own addresses.
        endpoints: opaque address by transport.
        chunk_tokens: tokens per chunk.
    """

    epoch: str
    address: int
    nbytes: int
    endpoints: dict[str, bytes]
    chunk_tokens: int


class ForgetStore(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: that epoch is over; drop the connections to it."""

    epoch: str


class ChunkRun(msgspec.Struct, frozen=True):
    """Consecutive chunks of a sequence in one store.

    Args:
        epoch: of the store.
        first_chunk: position of the first one in the sequence.
        offsets: where each lies in the arena, bytes.
        skipped_tokens: so many of the first chunk's are not moved.
    """

    epoch: str
    first_chunk: int
    offsets: tuple[int, ...]
    skipped_tokens: int = 0


class PlacedChunk(NamedTuple):
    """One chunk of a sequence: the epoch of a store, its position, its offset in the arena."""

    epoch: str
    position: int
    offset: int


def consecutive_runs(chunks: Iterable[PlacedChunk], skipped_tokens: int = 0) -> list[ChunkRun]:
    """Chunks by the longest runs of one store each; a run is planned and moved as one.

    Args:
        chunks: in the order of the sequence.
        skipped_tokens: so many of the first one's are not moved.
    """
    numbered = groupby(enumerate(chunks), lambda pair: (pair[1].epoch, pair[1].position - pair[0]))
    runs: list[ChunkRun] = []
    for (epoch, _), members in numbered:
        run = [chunk for _, chunk in members]
        offsets = tuple(chunk.offset for chunk in run)
        runs.append(ChunkRun(epoch, run[0].position, offsets, 0 if runs else skipped_tokens))
    return runs


class LoadRuns(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: read these chunks, layer by layer.

    Args:
        load_id: unique.
        request_id: whose; steps that run it wait for each layer until the load has ended, was
            cancelled, or is late.
        runs: what to read, in the order of the sequence.
        block_ids: the request's block table, from token 0.
        timeout_s: for all of it.
        release_layers: how many of the model's layers are to be there before a step may begin; 0:
            it begins once a thread loads, and waits for the first one. None: no step begins before
            the end.
        are_arriving: the chunks are on their way from SSDs into their stores' memory; what is there
            of all of them, ``LayersArrived`` says.
    """

    load_id: str
    request_id: str
    runs: tuple[ChunkRun, ...]
    block_ids: tuple[int, ...]
    timeout_s: float
    release_layers: int | None = None
    are_arriving: bool = False


class LayersArrived(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: so many layers of the model are in stores' memory, of all chunks of a load."""

    load_id: str
    num_layers: int


class CancelRuns(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: end that load, drain it, and report as usual."""

    load_id: str


class SaveRuns(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: write these chunks.

    Args:
        save_id: unique.
        runs: where to.
        block_ids: the request's block table, from token 0.
        timeout_s: for all of it.
        step: which computes the last of them: each layer is written once that step has it; None:
            all of it is there.
    """

    save_id: str
    runs: tuple[ChunkRun, ...]
    block_ids: tuple[int, ...]
    timeout_s: float
    step: int | None = None


class PoolRankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank, once: its transports are open, and this is the process that moves its KV."""

    process: ProcessName


class LayersLoaded(msgspec.Struct, frozen=True, tag=True):
    """From a rank: as many layers are there as the load was to be released after; if that is none,
    steps from now on wait for them."""

    load_id: str


class RunsEnded(msgspec.Struct, frozen=True, tag=True):
    """From a rank, once per order: nothing of it moves any more.

    Args:
        order_id: of the load or save.
        error: None if every byte has arrived.
        nbytes, seconds: what was moved, and how long it took from order to report.
        stalled_s: how long steps waited for its layers.
        begun_share: of a load's layers, how many had begun to move, of 1.
    """

    order_id: str
    error: str | None
    nbytes: int
    seconds: float
    stalled_s: float = 0.0
    begun_share: float = 0.0

    @property
    def missing_s(self) -> float:
        """What a load would have taken beyond ``seconds``, at least: no more can have moved than
        had begun to, and the rest would have come no faster. 0 if nothing had."""
        return self.seconds / self.begun_share - self.seconds if self.begun_share else 0.0


ToRank = ConnectStore | ForgetStore | LoadRuns | LayersArrived | CancelRuns | SaveRuns
FromRank = PoolRankReady | LayersLoaded | RunsEnded

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
