"""Self-registration of instances: authorization, what survives a renewal, and expiry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_api.instance_protocol import signed_head
from mooncake_proxy.errors import BadRequest, ConfigError, Conflict, Forbidden
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.upstream_connection import ClientContext, ClientLimits
from mooncake_proxy.pool.instances import InstanceSpec, InstanceState, Role
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange, apply_change
from mooncake_proxy.pool.model_pools import ModelPools
from mooncake_proxy.pool.registrations import HEADER, Registrations

SECRET = b"shared"
URL = "http://10.0.0.1:8100"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pools() -> Iterator[ModelPools]:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    found = ModelPools(ClientContext(ClientLimits(), loop=loop))
    yield found
    found.close()
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registrations(pools: ModelPools, clock: Clock) -> Registrations:
    return Registrations(pools, clock, SECRET)


def announce(to: Registrations, number: int, secret: bytes = SECRET, **changes: Any) -> Any:
    fields = {"url": URL, "started_at": 5.0, "number": number, "role": "decode", **changes}
    body = json.dumps(fields).encode()
    return to.receive({HEADER: signed_head(secret, "instance", body).encode()}, body)


def names(pools: ModelPools) -> list[str]:
    return [instance.name for instance in pools]


def test_all_secrets_are_accepted_and_the_first_one_signs(pools: ModelPools, clock: Clock) -> None:
    old, new, both = b"the old secret", b"the new secret", b"the new secret\nthe old secret"
    proxy = Registrations(pools, clock, both)
    for number, secret in enumerate((old, new, both)):
        announce(proxy, number, secret)
    with pytest.raises(Forbidden, match="not signed"):
        announce(proxy, 3, b"another secret")
    announce(Registrations(pools, clock, new), 3, both)
    with pytest.raises(Forbidden, match="not signed"):
        announce(Registrations(pools, clock, old), 4, both)


def test_registered_instance_stays_for_its_lease(
    registrations: Registrations, pools: ModelPools, clock: Clock
) -> None:
    instance = announce(registrations, 0)
    assert (instance.spec.role, instance.spec.source) == (Role.DECODE, "register")
    clock.now += 14
    announce(registrations, 1)
    clock.now += 14
    registrations.expire()
    assert names(pools) == [URL], "renewed"
    clock.now += 2
    registrations.expire()
    assert names(pools) == [], "silent for a lease"
    announce(registrations, 2)
    assert names(pools) == [URL], "back again"


def test_renewal_keeps_operator_changes(registrations: Registrations, pools: ModelPools) -> None:
    instance = announce(registrations, 0)
    pools.set_up(instance, up=False, error="refused")
    announce(registrations, 1)
    assert instance.state is InstanceState.DOWN
    pools.drain(URL)
    announce(registrations, 2)
    assert instance.is_draining


@pytest.mark.parametrize(
    "fields",
    [{"operation": ChangeOperation.REMOVE}, {"operation": ChangeOperation.DRAIN, "remove": True}],
)
def test_instance_that_an_operator_removes_stays_out_until_it_is_wanted_or_starts_anew(
    registrations: Registrations, pools: ModelPools, clock: Clock, fields: dict[str, Any]
) -> None:
    removal = MembershipChange(url=URL, **fields)
    announce(registrations, 0)
    apply_change(pools, removal)
    assert announce(registrations, 1) is None
    assert names(pools) == []
    apply_change(pools, MembershipChange(ChangeOperation.RESUME, URL))
    announce(registrations, 2)
    assert [instance.spec.source for instance in pools] == ["register"]
    apply_change(pools, removal)
    announce(registrations, 0, started_at=6.0)
    assert names(pools) == [URL], "it has been restarted"
    apply_change(pools, removal)
    announce(registrations, 1, started_at=6.0)
    clock.now += 16
    registrations.expire()
    announce(registrations, 2, started_at=6.0)
    assert names(pools) == [URL], "it was gone for a lease"
    apply_change(pools, removal)
    announce(registrations, 3, started_at=6.0, is_draining=True)
    assert pools.removed == {}


def test_instance_that_restarts_while_it_is_drained_to_be_removed_is_back(
    registrations: Registrations, pools: ModelPools
) -> None:
    instance = announce(registrations, 0)
    instance.num_running = 1
    apply_change(pools, MembershipChange(ChangeOperation.DRAIN, URL, remove=True))
    announce(registrations, 1)
    assert instance.is_draining
    announce(registrations, 0, started_at=6.0)
    assert not instance.is_draining


def test_deregistered_instance_is_removed_when_idle(
    registrations: Registrations, pools: ModelPools
) -> None:
    announce(registrations, 0)
    announce(registrations, 1, is_draining=True)
    assert names(pools) == []
    announce(registrations, 2, is_draining=True)  # of an unknown instance


def test_replayed_messages_are_rejected(registrations: Registrations) -> None:
    announce(registrations, 3)
    for number, started_at in ((3, 5.0), (2, 5.0), (9, 4.0)):
        with pytest.raises(Conflict, match="older than what is known"):
            announce(registrations, number, started_at=started_at)
    announce(registrations, 0, started_at=6.0)  # restarted


def test_restart_by_a_clock_that_was_set_back_is_accepted_once_the_lease_is_over(
    registrations: Registrations, pools: ModelPools, clock: Clock
) -> None:
    announce(registrations, 7, started_at=30_000.0)
    with pytest.raises(Conflict, match="older than what is known"):
        announce(registrations, 0, started_at=1000.0)
    clock.now += 15
    registrations.expire()
    announce(registrations, 1, started_at=1000.0)
    announce(registrations, 2, started_at=1000.0)
    assert names(pools) == [URL]
    for number, started_at in ((8, 30_000.0), (2, 1000.0)):
        with pytest.raises(Conflict, match="older than what is known"):
            announce(registrations, number, started_at=started_at)


def test_former_starts_are_not_replayed_when_the_instance_has_left(
    registrations: Registrations, pools: ModelPools
) -> None:
    for started_at in (5.0, 6.0, 7.0):
        announce(registrations, 0, started_at=started_at)
    announce(registrations, 1, started_at=7.0, is_draining=True)
    for started_at in (5.0, 6.0):
        with pytest.raises(Conflict, match="older than what is known"):
            announce(registrations, 9, started_at=started_at)
    assert names(pools) == []
    announce(registrations, 0, started_at=6.5)  # another host's, with a slower clock
    assert names(pools) == [URL]


def test_new_role_is_applied(registrations: Registrations) -> None:
    announce(registrations, 0)
    assert announce(registrations, 1, role="prefill").spec.role is Role.PREFILL


def test_unauthenticated_registrations_are_rejected(
    registrations: Registrations, pools: ModelPools
) -> None:
    with pytest.raises(Forbidden, match="not signed with"):
        announce(registrations, 0, secret=b"another")
    body = b"{}"
    head = {HEADER: signed_head(SECRET, "instance", b"something else").encode()}
    assert registrations.is_known(head), "valid headers with another body"
    with pytest.raises(Forbidden):
        registrations.receive(head, body)
    assert not registrations.is_known({})
    closed = Registrations(pools, Clock())
    assert not closed.is_known(head)
    with pytest.raises(Forbidden, match="--register-secret-file"):
        announce(closed, 0)
    assert names(pools) == []


def test_operators_role_stays_until_another_one_is_registered(
    registrations: Registrations, pools: ModelPools
) -> None:
    announce(registrations, 0, role="decode")
    pools.switch_role(URL, Role.PREFILL)
    announce(registrations, 1, role="decode")
    assert pools.get(URL).spec.role is Role.PREFILL
    announce(registrations, 2, role="both")
    assert pools.get(URL).spec.role is Role.BOTH
    announce(registrations, 3, role="decode")
    assert pools.get(URL).spec.role is Role.DECODE


def test_instances_from_flags_are_not_changed(
    registrations: Registrations, pools: ModelPools
) -> None:
    pools.add(InstanceSpec(Origin.parse(URL), Role.BOTH))
    with pytest.raises(Conflict, match="declared by flags"):
        announce(registrations, 0)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"lease_s": 0}, BadRequest),
        ({"lease_s": 1e9}, BadRequest),
        ({"role": "cook"}, BadRequest),
        ({"url": "nowhere"}, ConfigError),
    ],
)
def test_invalid_registrations_are_rejected(
    registrations: Registrations, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        announce(registrations, 0, **changes)


def test_message_is_replayed_to_no_other_worker(pools: ModelPools, clock: Clock) -> None:
    published: list[MembershipChange] = []
    first = Registrations(ModelPools(pools._context), clock, SECRET, published.append)
    second = Registrations(pools, clock, SECRET)
    announce(first, 0)
    announce(first, 1, is_draining=True)
    added, left = published
    second.apply(added)
    second.apply(left)
    with pytest.raises(Conflict, match="older than what is known"):
        announce(second, 0)
    assert second.apply(added) is None, "the other worker's message has come late"
    assert names(pools) == []


def test_other_workers_keep_the_same_leases(pools: ModelPools, clock: Clock) -> None:
    published: list[MembershipChange] = []
    first = Registrations(ModelPools(pools._context), clock, SECRET, published.append)
    second = Registrations(pools, clock)
    announce(first, 0)
    second.apply(published[-1])
    clock.now += 14
    announce(first, 1)
    second.apply(published[-1])
    clock.now += 14
    second.expire()
    assert names(pools) == [URL]
    announce(first, 2, is_draining=True)
    second.apply(published[-1])
    assert names(pools) == []
