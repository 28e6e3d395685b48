"""Steps of the prefill instance don't wait for layers that are still to be sent."""

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
    """Makes events of a device that lags behind with its work until ``may_continue`` is set."""

    def __init__(self) -> None:
        self.may_continue = threading.Event()
        self.recording: list[int] = []
        self.waiting: set[int] = set()


class LateEvent:
    """An ``Event`` that records the threads that use it."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.recording.append(threading.get_ident())

    def query(self) -> bool:
        return self._device.may_continue.is_set()

    def synchronize(self) -> None:
        self._device.waiting.add(threading.get_ident())
        self._device.may_continue.wait()


def test_no_step_waits_for_the_event_of_a_layer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has responded before its device has completed any layer; D waits for the KV."""
    device = Device()

    def late_context(*args: Any, **options: Any) -> RankContext:
        """Delay the connector's events, but not those by which the engine ends a step."""
        return RankContext(*args, **options | {"make_event": lambda: LateEvent(device)})

    async def main() -> None:
        async with instance(model) as single:
            expected = (await ask(single, PROMPT)).tokens
        monkeypatch.setattr("mooncake_engine.kv_connector.RankContext", late_context)
        async with push_pair(model, lease_s=60.0, transfer_timeout_s=60.0) as both:
            try:
                pending = asyncio.create_task(ask_pushed(both, PROMPT))
                await wait_until(lambda: bool(both.prefills and device.waiting), 60.0)
                assert not pending.done()
            finally:
                device.may_continue.set()
            assert (await pending).tokens == expected
            await both.check_clean()

    asyncio.run(main())
    assert len(device.recording) >= LAYERS
    assert not device.waiting & set(device.recording)
