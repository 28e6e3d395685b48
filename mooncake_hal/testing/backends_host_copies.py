"""The suite's tests of host copies: between pieces of device memory and packed pinned memory.

The ``staged`` transport relies on these copies.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mooncake_hal.backend import Allocation, Backend
from mooncake_hal.host_copies import HostCopier, HostCopies, PinnedMemory
from mooncake_hal.registry import Registry
from mooncake_hal.testing.backends_data import device_indexes
from mooncake_hal.testing.transports_buffers import ScatteredPieces, random_pieces

_ALIGNMENT = 64
_WORK_SECONDS = 0.03
_DEVICE_BYTES = 1 << 20
_PIECES: dict[str, list[int]] = {
    "one-byte": [1],
    "odd": [1, 3, 5, 17, 255, 4097],
    "tokens": [128] * 40,
    "blocks": [16 << 10] * 12,
    "large": [300 << 10, 300 << 10],
    "mixed": [1, 64 << 10, 7, 128, 128, 100 << 10],
}
"""Lengths in bytes. Instances with different numbers of ranks exchange the heads of single tokens,
others whole blocks."""


def view_bytes(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Host memory as an array, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _Memory:
    """Device memory and pinned memory of the same size, with known content."""

    def __init__(self, backend: Backend, copies: HostCopies, seed: int, index: int = 0) -> None:
        self._backend = backend
        self._index = index
        self.rng = np.random.default_rng(seed)
        self.allocation: Allocation = backend.memory.allocate(_DEVICE_BYTES, index)
        self.pinned: PinnedMemory = copies.allocate_pinned(_DEVICE_BYTES)
        self.host = view_bytes(self.pinned.address, self.pinned.nbytes)
        self.put(self.random())
        self.host[:] = self.random()

    def random(self) -> NDArray[np.uint8]:
        """Random content for either memory."""
        return self.rng.integers(0, 256, _DEVICE_BYTES, np.uint8)

    def put(self, content: NDArray[np.uint8]) -> None:
        """Overwrite the device memory."""
        self.allocation.tensor.copy_(torch.from_numpy(content))
        self._backend.runtime.synchronize(self._index)

    def get(self) -> NDArray[np.uint8]:
        """Return a copy of the device memory."""
        self._backend.runtime.synchronize(self._index)
        found: NDArray[np.uint8] = self.allocation.tensor.cpu().numpy().copy()
        return found

    def pieces(self, lengths: list[int]) -> ScatteredPieces:
        """Random pieces of the device memory."""
        return random_pieces(self.rng, np.array(lengths, np.int64), _DEVICE_BYTES)

    def addresses(self, pieces: ScatteredPieces) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Addresses and lengths of pieces, as copiers take them."""
        begin = np.uint64(self.allocation.region.address)
        return pieces.near.astype(np.uint64) + begin, pieces.nbytes.astype(np.uint64)

    def close(self) -> None:
        """Free both."""
        del self.host
        self.pinned.close()
        self.allocation.free()


def _packed(memory: NDArray[np.uint8], pieces: ScatteredPieces) -> NDArray[np.uint8]:
    ranges = zip(pieces.near.tolist(), pieces.nbytes.tolist(), strict=True)
    return np.concatenate([memory[begin : begin + size] for begin, size in ranges])


def _unpacked(
    memory: NDArray[np.uint8], packed: NDArray[np.uint8], pieces: ScatteredPieces
) -> NDArray[np.uint8]:
    result, at = memory.copy(), 0
    for begin, size in zip(pieces.near.tolist(), pieces.nbytes.tolist(), strict=True):
        result[begin : begin + size] = packed[at : at + size]
        at += size
    return result


def _device_name(backend: Backend, index: int) -> str:
    allocation = backend.memory.allocate(64, index)
    allocation.free()
    return allocation.region.device


class HostCopiesSuite:
    """Cases for ``BackendSpec.host_copies``; a backend without them keeps KV in host memory."""

    @pytest.fixture
    def host_copies(self, backend: Backend) -> HostCopies:
        """The host copies of the first device."""
        kind = _device_name(backend, 0)
        if kind == "cpu":
            pytest.skip(f"memory of backend {backend.name!r} is the host's own: nothing is copied")
        backend.runtime.bind_thread(0)
        return Registry.discover().host_copies(kind)

    @pytest.fixture
    def memory(self, backend: Backend, host_copies: HostCopies) -> Iterator[_Memory]:
        """Device memory and pinned memory with random content."""
        memory = _Memory(backend, host_copies, 7)
        yield memory
        memory.close()

    @pytest.fixture
    def copier(self, host_copies: HostCopies) -> Iterator[HostCopier]:
        """A copier of the test's thread."""
        copier = host_copies.copier()
        yield copier
        copier.close()

    def test_pinned_memory(self, host_copies: HostCopies) -> None:
        """Pinned memory is aligned and writable, and can be freed twice and on another thread."""
        first, second = (host_copies.allocate_pinned(100_000) for _ in range(2))
        for number, pinned in enumerate((first, second)):
            assert pinned.nbytes >= 100_000
            assert pinned.address % _ALIGNMENT == 0
            view_bytes(pinned.address, pinned.nbytes)[:] = number + 1
        assert (view_bytes(first.address, first.nbytes) == 1).all()
        second.close()
        closing = threading.Thread(target=first.close)
        closing.start()
        closing.join()
        first.close()

    @pytest.mark.parametrize("lengths", _PIECES.values(), ids=_PIECES)
    def test_gather(self, memory: _Memory, copier: HostCopier, lengths: list[int]) -> None:
        """Pieces are packed one after the other in the given order; no other bytes change."""
        pieces, device, host = memory.pieces(lengths), memory.get(), memory.host.copy()
        begin, total = 2 * _ALIGNMENT, sum(lengths)
        copier.gather(*memory.addresses(pieces), memory.pinned.address + begin)
        copier.drain()
        assert (memory.host[begin : begin + total] == _packed(device, pieces)).all()
        assert (memory.host[:begin] == host[:begin]).all()
        assert (memory.host[begin + total :] == host[begin + total :]).all()
        assert (memory.get() == device).all()

    @pytest.mark.parametrize("lengths", _PIECES.values(), ids=_PIECES)
    def test_scatter(self, memory: _Memory, copier: HostCopier, lengths: list[int]) -> None:
        """Every byte is copied to its position; no other bytes change."""
        pieces, device, host = memory.pieces(lengths), memory.get(), memory.host.copy()
        copier.scatter(memory.pinned.address, *memory.addresses(pieces))
        copier.drain()
        assert (memory.get() == _unpacked(device, host, pieces)).all()
        assert (memory.host == host).all()

    def test_copies_keep_the_order_of_their_calls(
        self, memory: _Memory, copier: HostCopier
    ) -> None:
        """Gathered pieces are scattered elsewhere and gathered again without draining between."""
        device, here, there = memory.get(), memory.pieces([4096] * 8), memory.pieces([4096] * 8)
        again = memory.pinned.address + _DEVICE_BYTES // 2
        copier.gather(*memory.addresses(here), memory.pinned.address)
        copier.scatter(memory.pinned.address, *memory.addresses(there))
        copier.gather(*memory.addresses(here), again)
        copier.drain()
        after = _unpacked(device, _packed(device, here), there)
        assert (memory.get() == after).all()
        found = memory.host[_DEVICE_BYTES // 2 :][: 8 * 4096]
        assert (found == _packed(after, here)).all()

    def test_every_device_has_its_copies(self, backend: Backend, host_copies: HostCopies) -> None:
        """Pieces of a device's memory are copied by that device's host copies."""
        for index in device_indexes(backend):
            backend.runtime.bind_thread(index)
            copies = Registry.discover().host_copies(_device_name(backend, index))
            memory, copier = _Memory(backend, copies, 9, index), copies.copier()
            pieces = memory.pieces([4096] * 8)
            copier.gather(*memory.addresses(pieces), memory.pinned.address)
            copier.drain()
            assert (memory.host[: 8 * 4096] == _packed(memory.get(), pieces)).all()
            copier.close()
            memory.close()
        backend.runtime.bind_thread(0)

    @pytest.mark.parametrize("how", ["event", "synchronize"])
    def test_copies_after_a_wait_see_the_devices_work(
        self, backend: Backend, memory: _Memory, copier: HostCopier, how: str
    ) -> None:
        """An event and ``synchronize`` wait for work that is enqueued, and takes tens of
        milliseconds: copies do not, so that KV would be sent before it is written."""
        runtime, tensor = backend.runtime, memory.allocation.tensor
        event = runtime.event(0)
        x = torch.zeros(512, 512, device=runtime.device(0))
        runtime.synchronize(0)
        begun = time.monotonic()
        x = x @ x
        runtime.synchronize(0)
        for _ in range(min(1000, int(_WORK_SECONDS / (time.monotonic() - begun)) + 1)):
            x = x @ x
        tensor.copy_((x[0, 0] + 9).to(torch.uint8).expand(len(tensor)))
        event.record()
        if how == "event":
            event.synchronize()
        else:
            runtime.synchronize(0)
        addresses = np.array([memory.allocation.region.address], np.uint64)
        copier.gather(addresses, np.array([len(tensor)], np.uint64), memory.pinned.address)
        copier.drain()
        assert (memory.host == 9).all()

    def test_nothing_is_enqueued(self, memory: _Memory, copier: HostCopier) -> None:
        """Draining without copies returns, also repeatedly."""
        copier.drain()
        copier.drain()

    def test_two_threads_copy_at_once(
        self, backend: Backend, host_copies: HostCopies, memory: _Memory
    ) -> None:
        """Two threads with a copier each do not interfere."""
        other = _Memory(backend, host_copies, 8)
        wrong: list[str] = []

        def work(mine: _Memory, name: str) -> None:
            backend.runtime.bind_thread(0)
            copier = host_copies.copier()
            for _ in range(5):
                pieces, device = mine.pieces([1024] * 60), mine.get()
                copier.gather(*mine.addresses(pieces), mine.pinned.address)
                copier.drain()
                if (mine.host[: 60 * 1024] != _packed(device, pieces)).any():
                    wrong.append(name)
            copier.close()

        threads = [
            threading.Thread(target=work, args=pair) for pair in ((memory, "1"), (other, "2"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other.close()
        assert wrong == []
