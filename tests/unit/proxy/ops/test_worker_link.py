"""Messages between workers: any number of counters, and pool changes for workers that start
later."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest

from mooncake_proxy.ops.proxy_metrics import ProxyMetrics
from mooncake_proxy.ops.worker_link import (
    MAX_MESSAGE_BYTES,
    ChangeLog,
    WorkerCounts,
    WorkerExited,
    WorkerLink,
    encode_message,
    split_snapshot,
)
from mooncake_proxy.pool.instances import Role
from mooncake_proxy.pool.membership import ChangeOperation, MembershipChange
from mooncake_proxy.pool.model_pools import ModelPools


def test_counters_of_many_instances_fit_into_messages() -> None:
    metrics = ProxyMetrics()
    for number in range(2000):
        name = f"http://instance-{number}.prefill.serving.svc.cluster.local:8100"
        metrics.attempts.add(name, "prefill", "ok")
        metrics.stage_seconds.observe(0.123456789, "prefill", name)
    parts = list(split_snapshot(metrics.snapshot()))
    assert [is_last for _, is_last in parts] == [False] * (len(parts) - 1) + [True]
    assert (
        max(len(encode_message(WorkerCounts(1, part[0], 0, part[1]))) for part in parts)
        < MAX_MESSAGE_BYTES
    )
    total = ProxyMetrics.sum_of([part for part, _ in parts])
    assert len(total.attempts.values) == len(total.stage_seconds.series) == 2000


def change(operation: ChangeOperation, url: str, **fields: object) -> MembershipChange:
    return MembershipChange(operation, url, **fields)  # type: ignore[arg-type]  # role, remove


def test_change_log_keeps_relevant_changes() -> None:
    log = ChangeLog()
    added = change(ChangeOperation.ADD, "http://a:1", role=Role.DECODE)
    for one in (
        change(ChangeOperation.REMOVE, "http://a:1"),
        added,
        change(ChangeOperation.DRAIN, "http://a:1"),
        change(ChangeOperation.RESUME, "http://a:1"),
        change(ChangeOperation.DRAIN, "http://b:1"),
        change(ChangeOperation.REMOVE, "http://b:1"),
        change(ChangeOperation.DRAIN, "http://c:1"),
    ):
        log.note(one, 0.0)
    [message] = log.messages(0.0)
    assert message.changes == [
        added,
        change(ChangeOperation.RESUME, "http://a:1"),
        change(ChangeOperation.REMOVE, "http://b:1"),
        change(ChangeOperation.DRAIN, "http://c:1"),
    ]


def test_renewed_registration_keeps_what_operators_decided() -> None:
    log, drained = ChangeLog(), change(ChangeOperation.DRAIN, "http://a:1")
    prefill = change(ChangeOperation.ROLE, "http://a:1", role=Role.PREFILL)
    fields = {"role": Role.DECODE, "source": "register"}
    added = change(ChangeOperation.ADD, "http://a:1", lease_s=15.0, **fields)
    longer = change(ChangeOperation.ADD, "http://a:1", lease_s=30.0, registered=(5.0, 2), **fields)

    def changes(now: float) -> list[MembershipChange]:
        return [one for message in log.messages(now) for one in message.changes]

    for one in (added, prefill, drained):
        log.note(one, 0.0)
    log.note(added, 14.0)
    assert changes(28.0) == [added, prefill, drained]
    assert changes(29.0) == [], "its lease has expired"
    log.note(longer, 28.0)
    assert changes(57.0) == [longer, prefill, drained]
    log.note(change(ChangeOperation.RESUME, "http://a:1"), 57.0)
    assert changes(58.0) == [], "only the instance itself renews its lease"
    log.note(longer, 58.0)
    assert changes(58.0) == [longer], "it has registered anew"
    left = change(ChangeOperation.DRAIN, "http://a:1", remove=True, lease_s=30.0, source="register")
    for one in (drained, left):
        log.note(one, 59.0)
    assert changes(59.0) == [left]
    log.note(longer, 60.0)
    assert changes(60.0) == [longer]


def test_renewed_registration_keeps_a_removal_until_the_instance_starts_anew() -> None:
    log, removed = ChangeLog(), change(ChangeOperation.REMOVE, "http://a:1")
    fields = {"role": Role.DECODE, "source": "register", "lease_s": 15.0}

    def registered(started_at: float, number: int) -> MembershipChange:
        of = (started_at, number)
        return change(ChangeOperation.ADD, "http://a:1", registered=of, **fields)

    def changes() -> list[MembershipChange]:
        return [one for message in log.messages(0.0) for one in message.changes]

    for one in (registered(5.0, 0), removed, registered(5.0, 1)):
        log.note(one, 0.0)
    assert changes() == [registered(5.0, 1), removed]
    drained = change(ChangeOperation.DRAIN, "http://a:1", remove=True)
    for one in (registered(6.0, 0), drained, registered(6.0, 1)):
        log.note(one, 0.0)
    assert changes() == [registered(6.0, 1), drained]
    log.note(registered(7.0, 0), 0.0)
    assert changes() == [registered(7.0, 0)]


def test_changes_without_effect_are_dropped_first(caplog: pytest.LogCaptureFixture) -> None:
    log = ChangeLog()
    added = change(ChangeOperation.ADD, "http://old:1", role=Role.DECODE)
    drained = change(ChangeOperation.DRAIN, "http://declared:1")
    removed = change(ChangeOperation.REMOVE, "http://declared:2")
    for one in (added, drained, removed):
        log.note(one, 0.0)
    for number in range(600):
        url = f"http://api-{number}:1"
        log.note(change(ChangeOperation.ADD, url, role=Role.DECODE), 1.0)
        log.note(change(ChangeOperation.DRAIN, url, remove=True), 2.0)
        leased = {"role": Role.DECODE, "source": "register", "lease_s": 15.0}
        log.note(change(ChangeOperation.ADD, f"http://registered-{number}:1", **leased), 3.0)

    def changes(now: float) -> list[MembershipChange]:
        return [one for message in log.messages(now) for one in message.changes]

    assert changes(3.0)[:3] == [added, drained, removed]
    for number in range(1000):
        log.note(change(ChangeOperation.DRAIN, f"http://drained-{number}:1"), 100.0)
        if number < 997:
            assert changes(100.0)[:3] == [added, drained, removed]
    kept = [one.url for one in changes(100.0)]
    assert kept == [f"http://drained-{number}:1" for number in range(1000)]
    assert [message.split(" ")[-1] for message in caplog.messages] == [
        *("http://old:1", "http://declared:1")
    ]


def test_counts_of_removed_instances_expire() -> None:
    metrics = ProxyMetrics()
    for name in ("kept", "gone"):
        metrics.attempts.add(name, "prefill", "ok")
        metrics.stage_seconds.observe(0.1, "prefill", name)
    metrics.forget_instances({"kept"}, now=0.0)
    assert len(metrics.attempts.values) == 2
    metrics.forget_instances({"kept"}, now=301.0)
    assert [values[0] for values in metrics.attempts.values] == ["kept"]
    assert [values[1] for values in metrics.stage_seconds.series] == ["kept"]


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {0, 2}])
def test_incomplete_counters_are_not_applied(lost: set[int]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    link = WorkerLink(0, ours)

    def receive_counts(round_: int, without: set[int]) -> None:
        for part in range(3):
            if part not in without:
                counts = {"total": [[[f"i{part}"], round_]]}
                link._process(WorkerCounts(1, counts, part, part == 2))

    def rows(round_: int) -> list[object]:
        return [{"total": [[[f"i{part}"], round_] for part in range(3)]}]

    receive_counts(1, set())
    receive_counts(2, lost)
    assert link.counts_of_others() == rows(1)
    receive_counts(3, set())
    assert link.counts_of_others() == rows(3)
    ours.close()
    theirs.close()


def test_counters_of_ended_workers_are_kept_as_one_sum() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    link = WorkerLink(0, ours)
    link._pools = ModelPools(Mock())
    for worker in range(1, 21):
        metrics = ProxyMetrics()
        metrics.attempts.add("i", "prefill", "ok")
        metrics.stage_seconds.observe(0.1, "prefill", "i")
        link._process(WorkerCounts(worker, metrics.snapshot(), 0, True))
        link._process(WorkerExited(worker))
    [counts] = link.counts_of_others()
    total = ProxyMetrics.sum_of([counts])
    assert total.attempts.values["i", "prefill", "ok"] == 20
    assert dict(counts)[total.stage_seconds.name] == total.stage_seconds.rows()
    ours.close()
    theirs.close()
