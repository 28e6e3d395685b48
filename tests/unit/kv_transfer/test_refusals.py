"""What is remembered of the instances that don't fit, and how loudly it is said."""

from __future__ import annotations

import logging

import pytest

from mooncake_engine.kv_transfer.refusals import REMEMBERED_REFUSALS, Refusals


def test_a_refusal_is_said_once_per_incarnation(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for name in ("a", "b", "a", "a"):
        refusals.note(name, "model differs")
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == [logging.ERROR, logging.ERROR]
    assert said[0][1].startswith("instance a and this one can't exchange KV")
    assert "model differs. Each request" in said[0][1]
    assert "restart one of the two" in said[0][1]
    assert refusals.num_peers == 2


def test_only_what_a_refused_peer_comes_to_is_logged_quietly() -> None:
    refusals = Refusals()
    refusals.note("a", "model differs")
    assert refusals.level("a") == logging.INFO
    assert refusals.level("b") == logging.WARNING


def test_only_the_latest_refusals_are_remembered_and_all_are_counted() -> None:
    refusals = Refusals()
    for index in range(REMEMBERED_REFUSALS + 1):
        refusals.note(str(index), "model differs")
    assert "0" not in refusals
    assert "1" in refusals
    assert len(refusals.engine_ids) == REMEMBERED_REFUSALS
    assert refusals.num_peers == REMEMBERED_REFUSALS + 1
