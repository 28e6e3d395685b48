"""What a rank has to tell vLLM, as it comes."""

from __future__ import annotations

import threading
import time

from mooncake_vllm.vllm_worker_side import Reports, Results

LONG_S = 30.0


def test_what_is_there_is_taken_at_once_and_once() -> None:
    reports = Reports()
    reports.add_send("a")
    began = time.monotonic()
    assert reports.take(LONG_S) == Results({"a"}, set(), set())
    assert time.monotonic() - began < LONG_S / 2
    assert reports.take() == Results(set(), set(), set())


def test_who_waits_is_told_of_a_load_when_it_ends() -> None:
    reports, taken = Reports(), []
    waiting = threading.Thread(target=lambda: taken.append(reports.take(LONG_S)))
    waiting.start()
    reports.add_load("a", is_failed=True)
    waiting.join(LONG_S / 2)
    assert taken == [Results(set(), {"a"}, {"a"})]


def test_nobody_waits_longer_than_asked() -> None:
    began = time.monotonic()
    assert Reports().take(0.01) == Results(set(), set(), set())
    assert 0.01 <= time.monotonic() - began < LONG_S
