"""The stream that buffers are spread on, through torch-npu."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch

from mooncake_hal_ascend.hccs.spreading import Wait
from mooncake_hal_ascend.runtime import npu


class NpuSideStream:
    """See ``SideStream``: one per device, made when it is first used."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None], device: torch.device) -> Wait:
        """See ``SideStream``."""
        npu.set_device(device)
        with npu.stream(self._stream(device)):
            work()
            done = npu.Event()
            done.record()
        return cast("Wait", done.synchronize)

    def _stream(self, device: torch.device) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = npu.Stream(device)
            return self._streams[device]
