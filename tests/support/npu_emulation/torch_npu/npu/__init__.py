"""``torch.npu``: devices, memory, streams, events and graphs of the emulated device."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torch_npu.npu.graphs import (  # noqa: F401  # torch.npu's names
    NPUGraph,
    Replay,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    running_replays,
)

_device = torch.ops.npu_emulation
Where = Any  # what torch takes for a device: None, an index, a name, a torch.device

_SOC_VERSIONS = {
    "A2": (222, "Ascend910B3"),
    "A3": (251, "Ascend910_9392"),
    "310P": (202, "Ascend310P3"),
}


def _soc() -> tuple[int, str]:
    return _SOC_VERSIONS[os.environ.get("NPU_EMULATION_GENERATION", "A2")]


def _index(where: Where) -> int:
    if where is None:
        return current_device()
    if isinstance(where, int):
        return where if where >= 0 else current_device()
    index = torch.device(where).index
    return current_device() if index is None else index


# ---------------------------------------------------------------- devices


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Initialisation is not deferred here."""


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_device.device_count())


def current_device() -> int:
    return int(_device.current_device())


def set_device(where: Where) -> None:
    _device.set_device(_index(where))


class device:  # torch's name
    """Makes a device current for a block."""

    def __init__(self, where: Where) -> None:
        self._index = _index(where)

    def __enter__(self) -> None:
        self._before = current_device()
        _device.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        _device.set_device(self._before)


def synchronize(where: Where = None) -> None:
    """Work is done when its call returns; only replays are said to run until here."""
    for replay in running_replays(_index(where)):
        replay.is_running = False


def get_device_name(where: Where = None) -> str:
    return _soc()[1]


def get_soc_version() -> int:
    return _soc()[0]


@dataclass(frozen=True)
class _Properties:
    name: str
    total_memory: int
    cube_core_num: int = 20
    vector_core_num: int = 40


def get_device_properties(where: Where = None) -> _Properties:
    if _index(where) >= device_count():
        raise RuntimeError(f"Invalid device ID {where}")
    return _Properties(_soc()[1], int(_device.total_bytes()))


# ---------------------------------------------------------------- memory


def mem_get_info(where: Where = None) -> tuple[int, int]:
    total = int(_device.total_bytes())
    return total - memory_allocated(where), total


def memory_allocated(where: Where = None) -> int:
    return int(_device.used_bytes(_index(where)))


def max_memory_allocated(where: Where = None) -> int:
    return int(_device.peak_bytes(_index(where)))


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(where: Where = None) -> None:
    _device.reset_peak(_index(where))


def empty_cache() -> None:
    """Nothing to free: no memory is cached."""


# ---------------------------------------------------------------- random numbers


def manual_seed(seed: int) -> None:
    _device.seed(seed)


manual_seed_all = manual_seed


# ---------------------------------------------------------------- streams and events


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Where = None, priority: int = 0, **_: Any) -> Stream:
        where = torch.device("npu", _index(device))
        return super().__new__(cls, device=where, priority=priority)  # type: ignore[no-any-return]

    @property
    def npu_stream(self) -> int:
        return self.stream_id


class Event:
    """A point in a stream's work; torch.Event's methods require that exact class."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._event = torch.Event("npu", enable_timing=enable_timing)
        self._is_recorded = False
        self._replays: list[Replay] = []  # those that were enqueued before it

    def record(self, stream: torch.Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self._event.record(stream)
        self._is_recorded = True
        self._replays = running_replays(stream.device_index, stream.stream_id)

    def wait(self, stream: torch.Stream | None = None) -> None:
        self._event.wait(current_stream() if stream is None else stream)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        if self._is_recorded:
            self._event.synchronize()
        for replay in self._replays:
            replay.is_running = False

    def elapsed_time(self, end: Event) -> float:
        return float(self._event.elapsed_time(end._event))


def current_stream(where: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", _index(where)))


def default_stream(where: Where = None) -> torch.Stream:
    return torch.Stream(torch.device("npu", _index(where)), stream_id=0)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(which: torch.Stream | None) -> Any:
    """Makes a stream current for a block."""
    if which is None:
        yield
        return
    with which:
        yield
