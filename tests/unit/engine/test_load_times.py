"""Loads that end while a core waits for commands are timed when they end."""

from __future__ import annotations

from support.scheduling import Bench, make_request
from support.scripted_core import ScriptedExecutor

from mooncake_engine.core import EngineCore
from mooncake_engine.messages import RequestTimes
from mooncake_kv.connector import LoadEnded


def test_a_load_ends_when_an_idle_core_is_told() -> None:
    """Nothing else runs, so that the last step was planned when the load began."""
    now = 100.0
    executor = ScriptedExecutor(lambda request: [7] * 8)
    core = EngineCore(Bench().scheduler, executor, clock=lambda: now)  # type: ignore[arg-type]
    request = make_request("d", range(10), first_token=7, arrival=now)
    core.add(request)
    core.step()
    now = 100.5
    core.post(LoadEnded("d", None))
    core.step()
    assert request.times == RequestTimes(100.0, 100.0, 100.5, 100.5, has_peer_token=True)
