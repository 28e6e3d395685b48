"""Steps of the prefill instance wait for no layer that is still to be sent."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.pd import ask, instance, prompt_of, wait_until
from support.push import ask_pushed, push_pair

from mooncake_kv.connector_worker import RankContext

LAYERS = 2
PROMPT = prompt_of(40)


class Device:
    """Makes events of a device that is behind with its work until ``goes_on`` is set."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.recording: list[int] = []
        self.waiting: set[int] = set()


class LateEvent:
    """An ``Event`` that notes the threads that use it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.recording.append(threading.get_ident())

    def query(self) -> bool:
        return self._device.goes_on.is_set()

    def synchronize(self) -> None:
        self._device.waiting.add(threading.get_ident())
        self._device.goes_on.wait()


def test_a_layer_is_an_event_that_no_step_waits_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has answered before its device is through with any layer; D waits for the KV."""
    device = Device()

    def late_context(*args: Any, **options: Any) -> RankContext:
        """The connector's events are late; those by which the engine ends a step are not."""
        return RankContext(*args, **options | {"make_event": lambda: LateEvent(device)})

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        monkeypatch.setattr("mooncake_engine.kv_connector.RankContext", late_context)
        async with push_pair(model, lease_s=60.0, transfer_timeout_s=60.0) as both:
            try:
                asking = asyncio.create_task(ask_pushed(both, PROMPT))
                await wait_until(lambda: bool(both.prefills and device.waiting), 60.0)
                assert not asking.done()
            finally:
                device.goes_on.set()
            assert (await asking).tokens == expected
            await both.check_clean()

    asyncio.run(main())
    assert len(device.recording) >= LAYERS
    assert not device.waiting & set(device.recording)
