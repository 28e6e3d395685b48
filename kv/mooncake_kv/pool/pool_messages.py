"""Messages between an instance's ``PoolClient`` and the ``PoolWorker`` of each rank."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import msgspec

from mooncake_hal.session.processes import ProcessName


class ConnectStore(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: how to reach a store. Precedes any order that names its epoch.

    Args:
        epoch: the store's epoch.
        address, nbytes: address and length of its arena, in its own address space.
        endpoints: opaque address by transport.
        chunk_tokens: tokens per chunk.
    """

    epoch: str
    address: int
    nbytes: int
    endpoints: dict[str, bytes]
    chunk_tokens: int


class ForgetStore(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: a store's epoch has ended; drop the connections to it."""

    epoch: str


class ChunkRun(msgspec.Struct, frozen=True):
    """Consecutive chunks of a sequence in one store.

    Args:
        epoch: the store's epoch.
        first_chunk: position of the first chunk in the sequence.
        offsets: offset of each chunk in the arena in bytes.
        skipped_tokens: number of leading tokens of the first chunk that are not moved.
    """

    epoch: str
    first_chunk: int
    offsets: tuple[int, ...]
    skipped_tokens: int = 0


class PlacedChunk(NamedTuple):
    """One chunk of a sequence: its store's epoch, its position, and its offset in the arena."""

    epoch: str
    position: int
    offset: int


def consecutive_runs(chunks: Iterable[PlacedChunk], skipped_tokens: int = 0) -> list[ChunkRun]:
    """Group chunks into the longest possible runs, each in one store. A run is planned and moved as
    a unit.

    Args:
        chunks: the chunks, in the order of the sequence.
        skipped_tokens: number of leading tokens of the first chunk that are not moved.
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
        load_id: unique id of the load.
        request_id: the request that the load is for. Steps that run it wait for each layer until
            the load has ended, was cancelled or timed out.
        runs: the chunks to read, in the order of the sequence.
        block_ids: the request's block table, from token 0; as in ``ChunkTransfer``.
        timeout_s: timeout of the whole load in seconds.
        release_layers: number of the model's layers that must arrive before a step may start. 0: a
            step may start once a thread has started the load, and waits for the first layer. None:
            no step may start before the load has ended.
        are_arriving: some chunks are still being read from SSDs into their stores' memory;
            ``LayersArrived`` reports which layers are there.
        window_stop: token that is computed next, see ``ChunkTransfer``. It is behind the runs if
            some of the requested chunks can't be loaded.
    """

    load_id: str
    request_id: str
    runs: tuple[ChunkRun, ...]
    block_ids: tuple[int, ...]
    timeout_s: float
    release_layers: int | None = None
    are_arriving: bool = False
    window_stop: int | None = None


class LayersArrived(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: the first ``num_layers`` of all chunks of a load are in the stores' memory."""

    load_id: str
    num_layers: int


class CancelRuns(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: cancel a load, drain it, and report it with ``RunsEnded`` as usual."""

    load_id: str


class SaveRuns(msgspec.Struct, frozen=True, tag=True):
    """To the ranks: write these chunks.

    Args:
        save_id: unique id of the save.
        runs: the chunks and where to write them.
        block_ids: the request's block table, from token 0; as in ``ChunkTransfer``.
        timeout_s: timeout of the whole save in seconds.
        step: number of the step that computes the last of the chunks; each layer is written once
            that step has computed it. None: all KV is computed already.
    """

    save_id: str
    runs: tuple[ChunkRun, ...]
    block_ids: tuple[int, ...]
    timeout_s: float
    step: int | None = None


class PoolRankReady(msgspec.Struct, frozen=True, tag=True):
    """From a rank, once: its transports are open. ``process`` is the process that moves its KV."""

    process: ProcessName


class LayersLoaded(msgspec.Struct, frozen=True, tag=True):
    """From a rank: the load's ``release_layers`` have arrived. If that is 0: a thread has started
    the load, and steps wait for its layers from now on."""

    load_id: str


class RunsEnded(msgspec.Struct, frozen=True, tag=True):
    """From a rank, once per order: the order has ended, and no transfer of it is in flight.

    Args:
        order_id: id of the load or save.
        error: why it failed; None if every byte has arrived.
        nbytes: bytes that were moved.
        seconds: seconds from the start of the order's work to its end.
        stalled_s: seconds that steps waited for its layers.
        begun_share: fraction of a load's layers whose transfers had been started, 0 to 1.
        by_transport: ``nbytes`` by the transports' names.
        may_still_arrive: whether a write failed in flight, whose data may still reach the store.
    """

    order_id: str
    error: str | None
    nbytes: int
    seconds: float
    stalled_s: float = 0.0
    begun_share: float = 0.0
    by_transport: dict[str, int] = {}
    may_still_arrive: bool = False

    @property
    def missing_s(self) -> float:
        """Lower bound of the seconds by which a load exceeds ``seconds``: at most the started
        layers have arrived, and the others would not have been faster. 0 if none was started."""
        return self.seconds / self.begun_share - self.seconds if self.begun_share else 0.0


def add_by_transport(total: dict[str, int], reports: Iterable[RunsEnded]) -> None:
    """Add the bytes of ``reports`` to ``total``, which counts bytes by transport."""
    for report in reports:
        for name, nbytes in report.by_transport.items():
            total[name] = total.get(name, 0) + nbytes


ToRank = ConnectStore | ForgetStore | LoadRuns | LayersArrived | CancelRuns | SaveRuns
FromRank = PoolRankReady | LayersLoaded | RunsEnded

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
