"""Active checks with hysteresis, and ejection by failed requests."""

from __future__ import annotations

from mooncake_proxy.errors import (
    ConnectFailed,
    DeadlineExceeded,
    Rejected,
    UpstreamTimeout,
)
from mooncake_proxy.pool.health_checks import HealthTrack, PassiveHealth


def test_hysteresis() -> None:
    track = HealthTrack()
    verdicts = [track.observe(good=good, rise=2, fall=3) for good in map(int, "1000110")]  # type: ignore[arg-type]  # 0 and 1
    assert verdicts == [True, None, None, False, None, True, None]


def test_an_ejected_instance_needs_its_row_of_good_checks_again() -> None:
    track = HealthTrack()
    for _ in range(9):
        track.observe(good=True, rise=2, fall=3)
    assert track.last_verdict
    track.note_ejection()
    assert [track.observe(good=True, rise=2, fall=3) for _ in range(2)] == [None, True]


def test_passive_ejection_counts_failures_in_a_row_and_no_error_statuses() -> None:
    health = PassiveHealth(2)
    refused, timeout = ConnectFailed("a", "no"), UpstreamTimeout("a", "silent")
    assert not health.failed("a", refused)
    health.succeeded("a")
    assert not health.failed("a", refused)
    assert not health.failed("a", Rejected("a", 500, {}, b""))
    assert not health.failed("a", DeadlineExceeded("a"))
    assert health.failed("a", timeout)
    assert not health.failed("a", timeout)  # whoever comes back starts anew
