"""The conformance suite of backends, for pytest.

A plugin's tests subclass ``BackendConformance`` and name the backend, which must be installed::

    class TestMyChip(BackendConformance):
        backend_name = "mychip"

If the backend is unavailable, the tests are skipped with the probe's reason. Backends that don't
compute use ``BackendBasics`` alone.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import ClassVar

import pytest
import torch

from mooncake_hal.backend import Backend, GroupSpec, Runtime
from mooncake_hal.errors import BackendUnavailable, CapabilityError, DeviceError, OutOfMemory
from mooncake_hal.kv.layout import KV_LAYOUTS
from mooncake_hal.registry import Registry
from mooncake_hal.testing.backends_data import device_indexes
from mooncake_hal.testing.backends_experts import ExpertsSuite
from mooncake_hal.testing.backends_fp8 import Fp8ExpertsSuite, Fp8LinearSuite
from mooncake_hal.testing.backends_host_copies import HostCopiesSuite
from mooncake_hal.testing.backends_latent import LatentSuite
from mooncake_hal.testing.backends_native_latents import NativeLatentsSuite
from mooncake_hal.testing.backends_ops import OpsSuite
from mooncake_hal.testing.backends_rank import SKIPPED
from mooncake_hal.testing.backends_rope_writes import RopeWritesSuite
from mooncake_hal.testing.backends_rows import RowsSuite
from mooncake_hal.testing.backends_sampling import SamplingSuite
from mooncake_hal.testing.backends_scaled_kv import ScaledKVSuite

RANKS_SECONDS = 100.0
"""Timeout of a scenario: longer than its group's timeout for a lost rank and than the timeout after
which a collective library reports one."""
_ports = random.SystemRandom()  # not seeded, so that processes choose different ports


_COPY_SECONDS = 60.0
"""Timeout for a thread to start on a busy machine."""


@lru_cache
def load_backend(name: str) -> Backend:
    """Load an installed backend, once per process.

    Raises:
        BackendUnavailable: it is not available; the reason is the probe's.
    """
    return Registry.discover().select_backend(name)


def _by_index(runtime: Runtime) -> tuple[Callable[[int], object], ...]:
    return runtime.device, runtime.bind_thread, runtime.event, runtime.copy_stream


class BackendBasics:
    """Tests of capabilities, runtime and memory, which every backend has."""

    backend_name: ClassVar[str]
    is_simulated: ClassVar[bool] = False
    """Whether the host simulates the devices: torch's device is then the host's, whatever the
    spec's ``device_type`` says."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend under test."""
        try:
            return load_backend(self.backend_name)
        except BackendUnavailable as exc:
            pytest.skip(str(exc))

    def test_name_and_capabilities(self, backend: Backend) -> None:
        """The names in the capabilities exist."""
        assert load_backend(backend.name) is backend
        capabilities = backend.capabilities
        names = (*capabilities.dtypes, *capabilities.kv_dtypes)
        assert all(isinstance(getattr(torch, name), torch.dtype) for name in names)
        assert capabilities.dtypes
        assert capabilities.block_sizes
        assert set(capabilities.kv_layouts) <= set(KV_LAYOUTS)
        assert capabilities.kv_layouts

    def test_devices(self, backend: Backend) -> None:
        """Devices are numbered, described and usable."""
        devices = backend.runtime.devices()
        assert [info.index for info in devices] == list(range(len(devices)))
        for info in devices:
            assert info.name
            assert info.generation
            backend.runtime.bind_thread(info.index)
            device = backend.runtime.device(info.index)
            assert torch.ones(2, device=device).device.type == device.type
            memory = backend.runtime.memory_info(info.index)
            assert 0 <= memory.free_bytes <= memory.total_bytes

    def test_the_spec_names_the_type_of_torchs_devices(self, backend: Backend) -> None:
        """Some parts of the engine ask the spec, others torch: they must not get two answers."""
        named = Registry.discover().device_type(backend.name) or "cpu"
        found = backend.runtime.device(0).type
        assert found == ("cpu" if self.is_simulated else named)

    def test_peak_memory(self, backend: Backend) -> None:
        """The peak is never negative, and does not exceed the device's memory. It grows by what is
        allocated, except on a host, whose memory for KV is not chosen by it."""
        runtime, nbytes = backend.runtime, 64 << 20
        device = runtime.device(0)
        runtime.reset_peak(0)
        before = runtime.peak_bytes(0)
        x = torch.ones(nbytes // 4, device=device)
        runtime.synchronize(0)
        peak = runtime.peak_bytes(0)
        assert 0 <= before <= peak <= runtime.memory_info(0).total_bytes
        if device.type != "cpu":
            assert peak - before >= nbytes, "weights and activations would count as nothing"
        assert float(x[0]) == 1.0

    def test_an_unknown_device_is_refused(self, backend: Backend) -> None:
        """The index is checked, not clipped."""
        beyond = len(backend.runtime.devices())
        for use in _by_index(backend.runtime):
            with pytest.raises(DeviceError, match=str(beyond)):
                use(beyond)
        with pytest.raises(DeviceError, match=str(beyond)):
            backend.memory.allocate(64, beyond)

    def test_events(self, backend: Backend) -> None:
        """A recorded event has finished once it is synchronized, on every device."""
        for index in device_indexes(backend):
            backend.runtime.bind_thread(index)
            event = backend.runtime.event(index)
            event.record()
            event.synchronize()
            assert event.query()
            backend.runtime.synchronize(index)
        backend.runtime.bind_thread(0)

    def test_copies_are_ordered(self, backend: Backend) -> None:
        """Copies run after the work that was enqueued before, in order, and concurrently with later
        work; their fences order accesses to the same memory."""
        device, stream = backend.runtime.device(0), backend.runtime.copy_stream(0)
        x = torch.zeros(1 << 16, device=device)
        host = torch.zeros(2, 1 << 16)
        started, may_continue = threading.Event(), threading.Event()

        def copy_out() -> None:
            started.set()
            assert may_continue.wait(_COPY_SECONDS)
            host[0].copy_(x)

        x.add_(1)
        first = stream.submit(copy_out)
        second = stream.submit(lambda: host[1].copy_(host[0] + 1))
        assert started.wait(_COPY_SECONDS)
        y = torch.ones(4, device=device) + 1  # runs concurrently
        assert y.tolist() == [2.0] * 4
        assert not first.query()
        may_continue.set()
        second.synchronize()
        assert first.query()
        assert second.query()
        x.fill_(9)
        assert host[0].eq(1).all()
        assert host[1].eq(2).all()
        back = stream.submit(lambda: x.copy_(host[1]))
        back.synchronize()
        assert x.eq(2).all()
        stream.close()
        stream.close()

    def test_a_fence_raises_the_error_of_its_copy(self, backend: Backend) -> None:
        """The fence raises the error, and the next copy runs."""
        stream = backend.runtime.copy_stream(0)
        x = torch.zeros(4, device=backend.runtime.device(0))
        failed = stream.submit(lambda: x.copy_(torch.ones(3)))
        done = stream.submit(lambda: x.copy_(torch.ones(4)))
        with pytest.raises(RuntimeError, match=r"\b3\b"):
            failed.synchronize()
        done.synchronize()
        assert x.eq(1).all()
        stream.close()

    def test_graphs_as_promised(self, backend: Backend) -> None:
        """A captured graph can be replayed; a backend without graphs raises CapabilityError."""
        x = torch.zeros(4, device=backend.runtime.device(0))
        if not backend.capabilities.graphs:
            with pytest.raises(CapabilityError):
                backend.runtime.capture(lambda: None)
            return

        def increment() -> None:
            x.add_(1)

        for _ in range(2):  # the second time, the first graph has been destroyed
            graph = backend.runtime.capture(increment)
            before = x.clone()
            graph.replay()
            assert torch.equal(x, before + 1)
            del graph

    @pytest.mark.parametrize("nbytes", [1, 4096, (2 << 20) + 1, 5 << 20])
    def test_memory(self, backend: Backend, nbytes: int) -> None:
        """Allocations are zeroed, distinct and of the requested size, and can be freed twice."""
        for index in device_indexes(backend):
            self._check_memory(backend, nbytes, index)

    def _check_memory(self, backend: Backend, nbytes: int, index: int) -> None:
        first, second = (backend.memory.allocate(nbytes, index) for _ in range(2))
        assert first.region.nbytes == nbytes
        assert first.region.device == "cpu" or first.region.device.endswith(f":{index}")
        device = backend.runtime.device(index)
        assert (first.tensor.device.type, first.tensor.device.index) == (device.type, device.index)
        assert first.tensor.shape == (nbytes,)
        assert first.tensor.dtype == torch.uint8
        assert first.tensor.data_ptr() == first.region.address
        assert not first.tensor.any()
        first.tensor.fill_(7)
        assert not second.tensor.any()
        for allocation in (first, second):
            allocation.free()
            allocation.free()
            with pytest.raises(DeviceError, match="freed"):
                _ = allocation.tensor

    def test_too_much_memory_is_refused_with_both_figures(self, backend: Backend) -> None:
        """The message says how much was requested and how much is free."""
        wanted = backend.runtime.memory_info(0).total_bytes * 4
        with pytest.raises(OutOfMemory, match=rf"{wanted} bytes.* \d+ .*free"):
            backend.memory.allocate(wanted, 0)

    def test_a_group_of_one_needs_no_rendezvous(self, backend: Backend) -> None:
        """With one rank, every collective is the identity."""
        group = backend.communicator(GroupSpec(0, 1, "tcp://127.0.0.1:1"))
        x = torch.arange(6.0, device=backend.runtime.device(0)).view(2, 3)
        assert (group.rank, group.world_size) == (0, 1)
        assert torch.equal(group.all_reduce(x), x)
        assert torch.equal(group.all_gather(x), x)
        assert torch.equal(group.broadcast(x, 0), x)
        assert torch.equal(group.start_all_to_all(x, [2], [2]).wait(), x)
        group.barrier()
        with pytest.raises(DeviceError, match="no rank 1 in a group of one"):
            group.send(x, 1)
        with pytest.raises(DeviceError, match="no rank 1 in a group of one"):
            group.recv(x, 1)
        group.close()


class CommunicatorSuite:
    """Collectives and messages between real processes."""

    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize(
        "scenario", ["collectives", "lost_rank", "lost_in_exchange", "lost_sender"]
    )
    def test_ranks(self, backend: Backend, scenario: str, world_size: int) -> None:
        """Each rank runs a scenario of ``backends_rank``. A device's collective library may
        terminate a rank that waits for a lost one."""
        is_device = backend.runtime.device(0).type != "cpu"
        may_be_ended = is_device and scenario != "collectives"
        for status, output in run_ranks(backend.name, scenario, world_size):
            if status == SKIPPED:
                pytest.skip(output.strip())
            assert status == 0 or (status == -signal.SIGABRT and may_be_ended), output


class BackendConformance(
    BackendBasics,
    OpsSuite,
    RowsSuite,
    ExpertsSuite,
    LatentSuite,
    NativeLatentsSuite,
    RopeWritesSuite,
    SamplingSuite,
    ScaledKVSuite,
    Fp8LinearSuite,
    Fp8ExpertsSuite,
    HostCopiesSuite,
    CommunicatorSuite,
):
    """The whole suite."""


def run_ranks(backend_name: str, scenario: str, world_size: int) -> list[tuple[int, str]]:
    """Run a scenario of ``backends_rank`` in several processes; returns (status, output) of
    each."""
    command = [sys.executable, "-m", "mooncake_hal.testing.backends_rank", backend_name, scenario]
    init_method = f"tcp://127.0.0.1:{free_port()}"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), init_method],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=RANKS_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def free_port() -> int:
    """A free port of the loopback interface on which a process can listen a little later. It is
    below the kernel's ephemeral ports, so that no other process is likely to get it meanwhile."""
    while True:
        port = _ports.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
