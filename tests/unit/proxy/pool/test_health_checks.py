"""Active checks with hysteresis, and ejection by failed requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_proxy.errors import (
    ConnectFailed,
    DeadlineExceeded,
    Rejected,
    UpstreamTimeout,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext
from mooncake_proxy.pool.health_checks import (
    HealthChecker,
    HealthConfig,
    HealthTrack,
    PassiveHealth,
)
from mooncake_proxy.pool.instance_reports import Compatibility
from mooncake_proxy.pool.instances import Instance, InstanceSpec, Role
from mooncake_proxy.pool.model_pools import ModelPools


def test_hysteresis() -> None:
    track = HealthTrack()
    verdicts = [track.observe(good=good, rise=2, fall=3) for good in map(int, "1000110")]  # type: ignore[arg-type]  # 0 and 1
    assert verdicts == [True, None, None, False, None, True, None]


def test_ejected_instance_needs_consecutive_good_checks_again() -> None:
    track = HealthTrack()
    for _ in range(9):
        track.observe(good=True, rise=2, fall=3)
    assert track.last_verdict
    track.note_ejection()
    assert [track.observe(good=True, rise=2, fall=3) for _ in range(2)] == [None, True]


def test_passive_ejection_counts_consecutive_failures_not_error_statuses() -> None:
    health = PassiveHealth(2)
    instance: Any = SimpleNamespace(num_failures=1)
    assert not health.failed(instance, Rejected("a", 500, {}, b""))
    assert not health.failed(instance, DeadlineExceeded("a"))
    assert health.failed(instance, UpstreamTimeout("a", "silent"))
    assert not health.failed(instance, ConnectFailed("a", "no"))  # starts from zero when it returns
    assert not any(PassiveHealth(0).failed(instance, ConnectFailed("a", "no")) for _ in range(9))


def checked(
    origin: Origin | None = None,
    body: bytes = b"{}",
    models: bytes = b"",
    port: int | None = None,
    *,
    models_status: bytes = b"200 OK",
    asked: list[bytes] | None = None,
    topologies: list[tuple[bytes, bytes]] | None = None,
    rounds: int = 1,
) -> Instance:
    """An instance after rounds of checks: at that origin, or with that health body, list of models
    (with that status), and port of KV events. ``asked`` gets the paths of its requests;
    ``topologies`` are its first answers about its topology."""

    async def main() -> Instance:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            path = request.split(b" ")[1]
            if asked is not None:
                asked.append(path)
            status, answer = b"200 OK", body
            if path == b"/v1/models":
                status, answer = models_status, models
            elif path == b"/kv/topology" and topologies:
                status, answer = topologies.pop(0)
            writer.write(head % (status, len(answer)) + answer)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        here = Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1])
        pools = ModelPools(ClientContext())
        instance = pools.add(InstanceSpec(origin or here, Role.BOTH, kv_events_port=port))
        checker = HealthChecker(HealthConfig(), pools, lambda _: None, lambda _: None)
        for _ in range(rounds):
            await checker.check_all()
        pools.close()
        server.close()
        return instance

    return asyncio.run(main())


@pytest.mark.parametrize(
    "origin", [Origin("http", ".svc", 8100), Origin("http", "127.0.0.1", 1 << 20)]
)
def test_invalid_address_is_down_and_does_not_stop_the_round(origin: Origin) -> None:
    instance = checked(origin)
    assert not instance.is_up
    assert "no such address" in instance.error


@pytest.mark.parametrize(
    "body", [b'{"engine_id":"\xff"}', b'{"kv_pool":' + b"[" * 10_000, b'{"engine_id":7}', b"ok"]
)
def test_any_health_body_is_healthy(body: bytes) -> None:
    assert checked(body=body).is_up


def test_internal_error_of_check_counts_against_its_instance_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: ModelPools, *args: object) -> None:
        raise ZeroDivisionError("of what it says")

    monkeypatch.setattr(ModelPools, "note_compatibility", fail)
    instance = checked()
    assert not instance.is_up
    assert "/health: ZeroDivisionError('of what it says')" in instance.error
    assert "Traceback" in caplog.text


TOPOLOGY = b'{"engine_id":"a","pulls_early":true}'


@pytest.mark.parametrize(
    ("answers", "requests", "pulls_early"),
    [
        ([(b"503 Unavailable", b""), (b"503 Unavailable", b""), (b"200 OK", TOPOLOGY)], 3, True),
        ([(b"404 Not Found", b"{}"), (b"200 OK", TOPOLOGY)], 1, False),
        ([(b"200 OK", b"no topology"), (b"200 OK", TOPOLOGY)], 1, False),
    ],
    ids=["busy", "publishes none", "malformed"],
)
def test_topology_is_asked_for_until_there_is_an_answer(
    answers: list[tuple[bytes, bytes]],
    requests: int,
    caplog: pytest.LogCaptureFixture,
    *,
    pulls_early: bool,
) -> None:
    asked: list[bytes] = []
    instance = checked(
        body=b'{"engine_id":"a"}',
        port=5557,
        models=b"no list",
        asked=asked,
        topologies=answers,
        rounds=5,
    )
    assert instance.topology is not None
    assert instance.topology.pulls_early is pulls_early
    assert asked.count(b"/kv/topology") == requests
    assert asked.count(b"/v1/models") == 1, "the lists of models are of the start"
    assert caplog.text.count("its topology is not known yet") == (requests > 1)


CARDS = b'{"data":[{"id":"m","parent":null},{"id":"also-m"},{"id":"sql","parent":"m"}]}'


@pytest.mark.parametrize(
    ("status", "cards", "requests"),
    [(b"401 Unauthorized", b"{}", 1), (b"503 Unavailable", b"{}", 3), (b"200 OK", b"no list", 1)],
)
def test_refused_list_of_models_is_asked_for_once_per_start(
    status: bytes, cards: bytes, requests: int
) -> None:
    asked: list[bytes] = []
    instance = checked(models=cards, port=5557, models_status=status, asked=asked, rounds=3)
    assert instance.is_up
    assert instance.base_models is None
    assert len([path for path in asked if path == b"/v1/models"]) == requests


@pytest.mark.parametrize(
    ("cards", "port", "wanted"),
    [
        (CARDS, 5557, frozenset({"m", "also-m"})),
        (CARDS, None, None),
        (b'{"error":"an API key"}', 5557, None),
        (b"no list", 5557, None),
    ],
    ids=["listed", "publishes nothing", "refused", "malformed"],
)
def test_names_of_the_model_itself_are_fetched(
    cards: bytes, port: int | None, wanted: frozenset[str] | None
) -> None:
    """An adapter names its model as parent, as in vLLM."""
    instance = checked(models=cards, port=port)
    assert instance.is_up
    assert instance.base_models == wanted


def test_model_names_are_known_of_an_instance_whose_store_publishes() -> None:
    body = b'{"kv_pool":{"kv_events":{"endpoint":"tcp://*:5557"}}}'
    assert checked(body=body, port=None, models=CARDS).base_models == {"m", "also-m"}


@pytest.mark.parametrize("added_again", [False, True])
@pytest.mark.parametrize("health", [None, b'{"engine_id":"b"}'], ids=["down", "restarted"])
def test_instance_that_is_removed_during_its_check_gets_no_verdict(
    health: bytes | None, caplog: pytest.LogCaptureFixture, *, added_again: bool
) -> None:
    """Whoever is told of a change finds the instance in its pool: a missing one would end the
    loop of the checks, and the proxy with it."""

    async def main() -> list[Instance]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            if instance in pools:
                pools.remove(instance.name)
                if added_again:
                    pools.add(instance.spec)
            if health is not None:
                head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(health) + health)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        origin = Origin("http", "127.0.0.1", server.sockets[0].getsockname()[1])
        pools, told = ModelPools(ClientContext()), []
        instance = pools.add(InstanceSpec(origin, Role.BOTH))
        pools.note_compatibility(instance, Compatibility("a"))
        checker = HealthChecker(HealthConfig(), pools, told.append, told.append)
        await checker.check_all()
        pools.close()
        server.close()
        return told

    assert asyncio.run(main()) == []
    assert "Traceback" not in caplog.text
