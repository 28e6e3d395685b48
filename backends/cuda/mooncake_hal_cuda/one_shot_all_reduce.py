"""One-shot all-reduces: one kernel over buffers that the ranks of a host map from each other.

A decode sums some ten KiB per layer, for which a library takes as many steps as several kernels.
Here each rank copies its part to its own buffer, signals all ranks, waits for all, and reads all
buffers: one exchange. Every rank reads every buffer, which is why larger messages stay with NCCL.

**Protocol.** Program p of a rank synchronises with program p of the other ranks and shares nothing
with any other program. Its n-th all-reduce is its call n. All ranks make the same calls in the same
order, so that n is the same on every rank, whatever the sizes of the messages. In call n a program

1. writes its chunk to half n mod 2 of its own buffer,
2. adds 1 to the arrival counter in every rank's buffer (a release, which publishes step 1),
3. waits until the counter in its own buffer is n times the number of ranks (an acquire), and
4. reads that half of every rank's buffer.

*The counter is a barrier.* While a rank has not arrived in call n, it has contributed at most
n - 1 to any counter, and every other rank at most n, because no rank adds for call n + 1 before it
has passed call n. The counter is therefore less than n times the number of ranks, and no rank
passes call n before all have arrived. A rank that has passed sees all chunks: each addition
releases everything that its rank has seen, including what it saw through other ranks, and
continues the release sequence of the additions before it.

*Two halves are enough.* A rank writes to half n mod 2 again in call n + 2, after it has passed
call n + 1. By then all ranks had arrived in call n + 1, and each had read all chunks of call n
before it arrived.

``tests/unit/cuda/test_one_shot_protocol.py`` checks all interleavings of small groups.

**Graphs.** The kernel counts calls in device memory, so that a replay continues after the last
call. Calls of one group must be ordered on the device, like NCCL's calls on one stream.

**A lost rank.** A program polls for the other ranks a bounded number of times, which takes at least
the group's timeout and at most a few times as long. Then the kernel fails with the message
``all-reduce: a rank is lost`` on standard error. From then on the process can't use the device: all
operations that wait for it raise, and the rank ends, as with NCCL's watchdog.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from mooncake_hal.backend import Communicator
from mooncake_hal.errors import DeviceError, HalError
from mooncake_hal.session.addressing import host_identity
from mooncake_hal_cuda.memory.memory_kinds import HANDLE_TYPES, DeviceSharing, MemoryKind
from mooncake_hal_cuda.transports.ipc_peer import DescriptorMailbox, send_descriptor

IMPLEMENTATIONS = ("auto", "nccl")
"""Values of MOONCAKE_HAL_CUDA_ALL_REDUCE."""
MAX_RANKS = 8
"""Largest group, in ranks: the GPUs of one host that are all connected pairwise. Reading the
buffers of more ranks would take too long."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_BYTES = 8 << 10
"""Bytes per program: 16 for each of 512 threads, so that the whole chunk is in flight at once."""
MAX_PROGRAMS = 64
"""Programs per launch. All of them must be resident at once, since each waits for one program of
every other rank. A processor holds at least two, so that 32 processors suffice; kernels that occupy
processors meanwhile complete without waiting for this one."""
MAX_BYTES = MAX_PROGRAMS * CHUNK_BYTES
MAX_BYTES_OF_MANY_RANKS = MAX_BYTES // 2
"""Largest message with more than two ranks, in bytes: reading 256 KiB of each of seven other ranks
takes about 4 us over NVLink at 450 GB/s, less than what the single exchange saves. With messages
twice as large, nothing would be saved."""

WORD_BYTES = 16
_WARPS = 16
_LINE_BYTES = 128
_CALLS = MAX_PROGRAMS * _LINE_BYTES
_HALVES = 2 * _CALLS
BUFFER_BYTES = _HALVES + 2 * MAX_BYTES
_POLLS_PER_SECOND = 5_000_000
"""Upper bound: one poll takes at least 0.2 us, for a read of L2 that bypasses L1, and two
barriers."""
_MAILBOX_TIMEOUT_S = 10.0
_NOTICE_BYTES = 4096
_LENGTH_BYTES = 4
_MAX_REASON_CHARS = 500

logger = logging.getLogger(__name__)


class RankDevice(msgspec.Struct, frozen=True, array_like=True):
    """The host and device of a rank.

    Args:
        host: see ``host_identity``.
        uuid: UUID of its device.
    """

    host: str
    uuid: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Whether a rank can take part, and the mailboxes to which others send their descriptors.

    Args:
        refusal: why the rank can't take part; empty if it can.
        mailboxes: by rank, (name, token) of the mailbox for that rank's descriptor.
    """

    refusal: str = ""
    mailboxes: tuple[tuple[str, bytes], ...] = ()


Notice = TypeVar("Notice", RankDevice, Offer)


class OneShotAllReduce:
    """Small all-reduces of one rank, in a group whose ranks all support them.

    Args:
        rank: rank of this process.
        buffers: by rank, address in this process of the rank's buffer.
        device: device of this rank.
        timeout_s: minimum time to wait for the other ranks, in seconds.
        release: unmaps and frees the buffers.
    """

    def __init__(
        self,
        rank: int,
        buffers: Sequence[int],
        device: torch.device,
        timeout_s: float,
        release: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._buffers = torch.tensor(buffers, dtype=torch.int64, device=device)
        self._max_polls = int(timeout_s * _POLLS_PER_SECOND)
        self._release = release
        self.max_message_bytes = max_message_bytes(len(buffers))

    def supports(self, x: Tensor) -> bool:
        """Whether ``run`` supports ``x``; the answer is the same on every rank."""
        return supports(x, self.max_message_bytes)

    def run(self, x: Tensor) -> Tensor:
        """Enqueue the sum over all ranks on the current stream, in place; returns x."""
        from mooncake_hal_cuda.kernels.all_reduce_kernel import one_shot_all_reduce

        dense = x.contiguous()
        if dense.data_ptr() % WORD_BYTES:
            dense = dense.clone()
        num_bytes = dense.numel() * dense.element_size()
        world_size = len(self._buffers)
        one_shot_all_reduce[(-(-num_bytes // CHUNK_BYTES),)](
            dense,
            self._buffers,
            self._rank,
            num_bytes // WORD_BYTES,
            self._max_polls,
            WORLD_SIZE=world_size,
            WORLD_PADDED=1 << (world_size - 1).bit_length(),
            WORD=WORD_BYTES // dense.element_size(),
            CHUNK=CHUNK_BYTES // dense.element_size(),
            LINE=_LINE_BYTES,
            CALLS=_CALLS,
            HALVES=_HALVES,
            HALF_BYTES=MAX_BYTES,
            num_warps=_WARPS,
            debug=True,  # which device_assert needs
            sanitize_overflow=False,  # and would bring along
        )
        return x if dense is x else x.copy_(dense)

    def close(self) -> None:
        """Wait for the device and unmap all buffers; must be called once.

        The memory of this rank's buffer is freed when the other ranks have unmapped it too.
        """
        try:
            self._release()
        except DeviceError as exc:
            logger.warning("buffers of all-reduces stay allocated until the process ends: %s", exc)


class SmallAllReduce:
    """Opens ``OneShotAllReduce`` at a group's first all-reduce, and runs the all-reduces that it
    supports.

    The first all-reduce is the same on all ranks, and precedes any graph capture. The caller runs
    all other all-reduces itself.

    Args:
        sharing: the driver, and the memory kind of each device.
        timeout_s: see ``OneShotAllReduce``.
        implementation: one of ``IMPLEMENTATIONS``.
    """

    def __init__(
        self, sharing: DeviceSharing, timeout_s: float, implementation: str = IMPLEMENTATIONS[0]
    ) -> None:
        self._sharing = sharing
        self._timeout_s = timeout_s
        self._implementation = implementation
        self._is_decided = False
        self._opened: OneShotAllReduce | None = None

    def reduce(self, group: Communicator, x: Tensor) -> bool:
        """Sum ``x`` over the group, in place; returns False if ``x`` was left unchanged."""
        if not self._is_decided:
            self._is_decided = True
            self._opened = self._open(group, x.device)
        if self._opened is None or not self._opened.supports(x):
            return False
        self._opened.run(x)
        return True

    def _open(self, group: Communicator, device: torch.device) -> OneShotAllReduce | None:
        """Map all ranks' buffers if every rank can. Otherwise return None on every rank; rank 0
        logs the reason."""
        with ExitStack() as undo:
            refusal = ""
            if self._implementation == "nccl":
                refusal = "MOONCAKE_HAL_CUDA_ALL_REDUCE=nccl requests it"
            exchange = _BufferExchange(group, self._sharing, device, undo)
            refusal, buffers = exchange.agree(refusal)
            if refusal:
                if group.rank == 0:
                    logger.warning("all-reduces of all sizes run on NCCL: %s", refusal)
                return None
            release = undo.pop_all().close
        opened = OneShotAllReduce(group.rank, buffers, device, self._timeout_s, release)
        if group.rank == 0:
            logger.info(
                "all-reduces of up to %d KiB run as one kernel over memory shared by %d ranks",
                opened.max_message_bytes >> 10,
                group.world_size,
            )
        return opened

    def close(self) -> None:
        """Free the memory; idempotent."""
        opened, self._opened, self._is_decided = self._opened, None, True
        if opened is not None:
            opened.close()


def max_message_bytes(world_size: int) -> int:
    """Largest message for a number of ranks, in bytes."""
    return MAX_BYTES if world_size == 2 else MAX_BYTES_OF_MANY_RANKS


def supports(x: Tensor, limit: int) -> bool:
    """Whether the kernel supports ``x``: floating point, whole words, at most ``limit`` bytes."""
    num_bytes = x.numel() * x.element_size()
    return x.dtype in DTYPES and 0 < num_bytes <= limit and num_bytes % WORD_BYTES == 0


def unsupported_reason(sharing: DeviceSharing, rank: int, devices: Sequence[RankDevice]) -> str:
    """The reason why a rank can't share memory with the others, or an empty string."""
    if len(devices) > MAX_RANKS:
        return f"the group has {len(devices)} ranks, at most {MAX_RANKS} are supported"
    if len({each.host for each in devices}) > 1:
        return "the ranks are on different hosts or in different network namespaces"
    for each in devices:
        if reason := sharing.no_atomics_reason(devices[rank].uuid, each.uuid):
            return reason
    return ""


class _BufferExchange:
    """The exchange in which all ranks map all buffers, or all learn why they can't.

    Args:
        group, sharing, device: see ``SmallAllReduce``.
        undo: receives the callbacks that free everything.
    """

    def __init__(
        self, group: Communicator, sharing: DeviceSharing, device: torch.device, undo: ExitStack
    ) -> None:
        self._group = group
        self._sharing = sharing
        self._device = device
        self._index = device.index or 0
        self._undo = undo
        self._mailboxes: dict[int, DescriptorMailbox] = {}
        self._own_buffer = 0

    def agree(self, refusal: str) -> tuple[str, list[int]]:
        """Map all buffers, or agree on a reason why not.

        Args:
            refusal: why this rank declines; empty if it does not.

        Returns:
            (reason, addresses of the ranks' buffers in this process). The reason is the same on all
            ranks; the addresses are valid only if it is empty.
        """
        driver = self._sharing.driver
        driver.bind(self._index)
        devices = self._gather(RankDevice(host_identity(), driver.uuid(self._index)))
        refusal = refusal or unsupported_reason(self._sharing, self._group.rank, devices)
        buffers: list[int] = []
        with ExitStack() as mailboxes:
            try:
                offer = Offer(refusal) if refusal else self._offer(mailboxes)
            except (HalError, OSError) as exc:
                offer = Offer(str(exc)[:_MAX_REASON_CHARS])
            offers = self._gather(offer)
            if refusal := _first_refusal(offers):
                return refusal, []
            try:
                buffers, offer = self._map(offers), Offer()
            except (HalError, OSError) as exc:
                offer = Offer(str(exc)[:_MAX_REASON_CHARS])
            return _first_refusal(self._gather(offer)), buffers

    def _offer(self, mailboxes: ExitStack) -> Offer:
        """Allocate this rank's buffer, and open mailboxes for the others' descriptors."""
        sharing, index = self._sharing, self._index
        if (decided := sharing.of(index)).kind is MemoryKind.IPC:
            # IPC memory must not be freed before every rank has unmapped it, but ranks that end do
            # not wait for each other
            return Offer(f"memory can't be shared by descriptor: {decided.reason}")
        types = HANDLE_TYPES[MemoryKind.DESCRIPTOR]
        mapped = sharing.virtual.allocate(BUFFER_BYTES, index, types, is_rdma=False)
        self._undo.callback(mapped.close)
        self._own_buffer = mapped.address
        endpoints = [("", b"")] * self._group.world_size
        for rank in self._others():
            mailbox = self._mailboxes[rank] = DescriptorMailbox()
            mailboxes.callback(mailbox.close)
            endpoints[rank] = mailbox.name, mailbox.token
        return Offer(mailboxes=tuple(endpoints))

    def _map(self, offers: Sequence[Offer]) -> list[int]:
        """Send a descriptor of this rank's buffer to all other ranks, and map their buffers."""
        sharing, index, rank = self._sharing, self._index, self._group.rank
        descriptor = sharing.virtual.export_descriptor(self._own_buffer)
        try:
            for other in self._others():
                send_descriptor(*offers[other].mailboxes[rank], descriptor)
        finally:
            os.close(descriptor)
        _, nbytes = sharing.driver.allocation_of(self._own_buffer)
        buffers = [self._own_buffer] * self._group.world_size
        for other in self._others():
            received = self._mailboxes[other].receive(_MAILBOX_TIMEOUT_S)
            try:
                mapped = sharing.virtual.open_descriptor(received, nbytes, index)
            finally:
                os.close(received)
            self._undo.callback(mapped.close)
            buffers[other] = mapped.address
        self._undo.callback(sharing.driver.synchronize)  # unmapping does not wait for kernels
        self._undo.callback(sharing.driver.bind, index)
        return buffers

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.world_size) if rank != self._group.rank]

    def _gather(self, notice: Notice) -> list[Notice]:
        """Gather the notices of all ranks."""
        encoded, row = msgspec.msgpack.encode(notice), bytearray(_NOTICE_BYTES)
        row[:_LENGTH_BYTES] = len(encoded).to_bytes(_LENGTH_BYTES, "little")
        row[_LENGTH_BYTES : _LENGTH_BYTES + len(encoded)] = encoded
        mine = torch.frombuffer(row, dtype=torch.uint8).to(self._device).view(1, -1)
        rows = self._group.all_gather(mine, dim=0).cpu().numpy()
        lengths = (int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little") for row in rows)
        return [
            msgspec.msgpack.decode(
                row[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes(), type=type(notice)
            )
            for row, length in zip(rows, lengths, strict=True)
        ]


def _first_refusal(offers: Sequence[Offer]) -> str:
    """The refusal of the first rank that has one, or an empty string."""
    refused = ((rank, offer.refusal) for rank, offer in enumerate(offers) if offer.refusal)
    return next((f"rank {rank}: {refusal}" for rank, refusal in refused), "")
