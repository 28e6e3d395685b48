"""When the conductor plans a fetch, the proxy names the store that holds the prefix to the prefill
instance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import FakeDeployment, FakeInstance, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_kv.params import PrefixSource, parse_kv_transfer_params
from mooncake_proxy.routing.conductor_fleet import ConductorFleet
from mooncake_proxy.routing.fleet_holdings import FleetHoldings

NUM_TOKENS = 64 * 256
IDS = list(range(100, 100 + NUM_TOKENS))
BUSY_S = 20.0
"""Load on the instance that holds the prefix, so that another instance fetches or computes it."""


@pytest.fixture(autouse=True)
def no_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore measured times: on a busy machine those of fake instances say nothing about real
    ones."""
    monkeypatch.setattr(ConductorFleet, "measure_prefill", lambda *args: None)


def _use_pool(fake: FakeInstance, port: int, **store: Any) -> None:
    location = {"host": "10.0.0.1", "port": port, "epoch": f"epoch-{port}"}
    fake.behaviour.kv_pool = {"saved": 1, "found": {}, "store": location | store}


async def _second_turn(
    s: FakeDeployment, between: Callable[[], None] = lambda: None
) -> tuple[FakeInstance, dict[str, Any]]:
    """The busy holder of a prompt's prefix, and the parameters that another instance receives with
    the prompt. `between` runs before the second request."""
    await s.app.checker.check_all()
    assert (await post(s, BODY | {"prompt": IDS})).status_code == 200
    [home] = [fake for fake in s.prefills if fake.generated]
    between()
    await s.app.checker.check_all()
    pairs = conductor_of(s).pairs
    slot = next(n for n, name in pairs.conductor.fleet.names.items() if name == home.url)
    pairs.conductor.fleet.queues.enter(slot, "another", BUSY_S, 1, s.app.router.now())
    assert (await post(s, BODY | {"prompt": IDS})).status_code == 200
    pairs.conductor.fleet.queues.leave(slot, "another", s.app.router.now())
    [other] = [fake for fake in s.prefills if fake is not home and fake.generated]
    return home, other.generated[-1].body["kv_transfer_params"]


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_prefill_instance_receives_fetch_source(flow: str) -> None:
    async def main() -> None:
        async with fake_deployment(2, 1, **settings(flow=flow)) as s:
            for number, fake in enumerate(s.prefills):
                _use_pool(fake, 7701 + number)
            home, params = await _second_turn(s)
            port = 7701 + s.prefills.index(home)
            [source] = params["prefix_sources"]
            assert source == {
                "host": "10.0.0.1",
                "port": port,
                "epoch": f"epoch-{port}",
                "num_tokens": NUM_TOKENS,
            }
            assert params["do_remote_decode"] is True
            check_nothing_is_reserved(s)

    uvloop.run(main())


@pytest.mark.parametrize("missing", ["pool", "store"])
def test_holder_that_cannot_send_is_no_fetch_source(missing: str) -> None:
    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            if missing == "store":
                for fake in s.prefills:
                    fake.behaviour.kv_pool = {"saved": 1, "found": {}}
            _, params = await _second_turn(s)
            assert "prefix_sources" not in params
            plans = [r.decision.prefill.plan.value for r in conductor_of(s)._records.values()]
            assert "fetch" not in plans

    uvloop.run(main())


def test_restarted_store_is_named_with_new_epoch() -> None:
    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            for number, fake in enumerate(s.prefills):
                _use_pool(fake, 7701 + number)

            def restart() -> None:
                for number, fake in enumerate(s.prefills):
                    _use_pool(fake, 7701 + number, epoch="another")

            _, params = await _second_turn(s, restart)
            assert [source["epoch"] for source in params["prefix_sources"]] == ["another"]

    uvloop.run(main())


def test_store_that_has_published_the_prefix_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The holder loads from it, but saves to another one."""
    publishing = f"ipc://{tmp_path}/events"
    monkeypatch.setattr(
        FleetHoldings, "is_in_store", lambda self, events, key: events.endpoint == publishing
    )

    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            for number, fake in enumerate(s.prefills):
                _use_pool(fake, 7701 + number)
                other = {"host": "10.0.0.9", "port": 7709, "epoch": "e"}
                fake.behaviour.kv_pool["other_stores"] = [
                    {"kv_events": {"endpoint": publishing}},  # that others can't reach
                    {"store": other, "kv_events": {"endpoint": publishing}},
                ]
            await s.app.checker.check_all()
            conductor_of(s).pairs.sync_with_pool(s.app.router.now())  # subscribes
            _, params = await _second_turn(s)
            assert [source["port"] for source in params["prefix_sources"]] == [7709]

    uvloop.run(main())


def test_next_store_is_named_while_the_first_one_cannot_be_used() -> None:
    """The holder saves to the next one then."""

    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            other = {"host": "10.0.0.9", "port": 7709, "epoch": "e"}
            for fake in s.prefills:
                fake.behaviour.kv_pool = {"saved": 1, "found": {}}
                fake.behaviour.kv_pool["other_stores"] = [{"store": other}]
            _, params = await _second_turn(s)
            assert [source["port"] for source in params["prefix_sources"]] == [7709]

    uvloop.run(main())


def test_engine_parses_fetch_source_of_proxy() -> None:
    async def main() -> None:
        async with fake_deployment(2, 1, **settings()) as s:
            for number, fake in enumerate(s.prefills):
                _use_pool(fake, 7701 + number)
            home, params = await _second_turn(s)
            port = 7701 + s.prefills.index(home)
            found = parse_kv_transfer_params(params, IDS)
            assert found.keeps_kv
            wanted = PrefixSource("10.0.0.1", port, f"epoch-{port}", NUM_TOKENS)
            assert found.prefix_sources == (wanted,)

    uvloop.run(main())


def test_instance_of_both_roles_receives_fetch_source() -> None:
    async def main() -> None:
        async with fake_deployment(0, 0, 2, **settings()) as s:
            for number, fake in enumerate(s.decodes):
                _use_pool(fake, 7701 + number)
            await s.app.checker.check_all()
            assert (await post(s, BODY | {"prompt": IDS})).status_code == 200
            [home] = [fake for fake in s.decodes if fake.generated]
            coupled = conductor_of(s).coupled
            slot = next(n for n, name in coupled.conductor.fleet.names.items() if name == home.url)
            coupled.conductor.fleet.queues.enter(slot, "other", BUSY_S, 1, s.app.router.now())
            assert (await post(s, BODY | {"prompt": IDS})).status_code == 200
            [other] = [fake for fake in s.decodes if fake is not home]
            [source] = other.generated[-1].body["kv_transfer_params"]["prefix_sources"]
            assert source["num_tokens"] == NUM_TOKENS

    uvloop.run(main())
