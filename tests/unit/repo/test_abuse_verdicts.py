"""The result table of ``make test-abuse``: which results fail, and the message of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.abuse.catalogue import ATTACKS, BY_NAME
from support.abuse.fuzzing import read_corpus
from support.abuse.verdicts import (
    Bounds,
    Largest,
    Outcome,
    head,
    problems,
    row,
    summary,
)

GOOD = Outcome(
    attack="flood",
    tries=10,
    lost=(),
    right=5,
    wrong=(),
    unanswered=(),
    growth_mib=Largest(60.0, "proxy"),
    silence_s=Largest(1.0, "decode-0"),
    complaints=(),
    bounds=Bounds(growth_mib=64, silence_s=5.0),
)


def test_results_within_bounds_pass() -> None:
    assert problems(GOOD) == []
    assert row(GOOD).split() == ["flood", "10", "0", "0", "0/0", "5", "60/64", "1.0/5", "ok"]
    assert summary([GOOD]) == "1 attacks, 10 tries: all within their bounds"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tries": 0}, "nothing was tried"),
        ({"right": 0}, "no ordinary request was answered, so nothing was compared"),
        ({"lost": ("decode-1",)}, "lost: decode-1"),
        ({"wrong": ("a, not b",)}, "wrong answers to others: a, not b"),
        ({"unanswered": ("503",)}, "1 ordinary requests failed, at most 0 may: 503"),
        ({"growth_mib": Largest(65.0, "proxy.1")}, "proxy.1 grew by 65 of 64 MiB"),
        ({"silence_s": Largest(5.5, "proxy")}, "proxy was silent for 5.5 of 5.0 s"),
        ({"complaints": ("500",)}, "seen by the attack: 500"),
    ],
)
def test_each_bound_fails_separately_with_reason(changed: dict[str, object], reason: str) -> None:
    outcome = replace(GOOD, **changed)  # type: ignore[arg-type]
    assert problems(outcome) == [reason]
    line, why = row(outcome).splitlines()
    assert line.endswith("FAIL")
    assert why.strip() == reason
    assert summary([GOOD, outcome]).endswith("FAILED: flood")


def test_number_of_printed_reasons_is_limited() -> None:
    outcome = replace(GOOD, wrong=tuple("abcde"))
    assert problems(outcome) == ["wrong answers to others: a; b; c and 2 more"]


def test_busy_host_only_extends_time_bounds() -> None:
    assert Bounds(64, 5.0, 3).slacken(4.0) == Bounds(64, 20.0, 3)


def test_largest_of_several_keeps_its_name() -> None:
    found = Largest().or_larger(2.0, "a").or_larger(3.0, "b").or_larger(1.0, "c")
    assert found == Largest(3.0, "b")


def test_attack_names_are_unique_and_fit_the_table() -> None:
    assert len(BY_NAME) == len(ATTACKS)
    assert all(len(attack.name) < 26 and attack.about for attack in ATTACKS)
    assert len(head()) <= 100


@pytest.mark.parametrize("name", ["http", "session"])
def test_corpora_are_bytes(name: str) -> None:
    assert len({*read_corpus(name)}) == len(read_corpus(name)) > 20
