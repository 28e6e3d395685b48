"""Which lines of a dead child's standard error are reported as the reason."""

from __future__ import annotations

from mooncake_engine.process.child_processes import StderrTail

INFO = [f"2026-01-01 00:00:00,000 INFO mooncake_engine: line {number}" for number in range(5)]


def after(*lines: str) -> str:
    words = StderrTail()
    for line in lines:
        words.note(line)
    return str(words)


def test_error_is_kept_despite_later_lines() -> None:
    error = "2026-01-01 00:00:00,000 ERROR mooncake_engine: rank 1 of 2 died"
    assert after(INFO[0], error, *INFO) == error


def test_command_line_error_is_an_error() -> None:
    refusal = "mooncake-engine: error: port 1 on 127.0.0.1 is in use"
    assert after(*INFO, refusal) == refusal


def test_traceback_is_reported_by_its_last_line() -> None:
    frames = ["Traceback (most recent call last):", '  File "x.py", line 1', "    error: no"]
    assert after(*INFO, *frames, "x.EngineDead: gone", *INFO) == "x.EngineDead: gone"


def test_last_errors_are_reported_in_order() -> None:
    errors = [f"x ERROR y: {number}" for number in range(5)]
    assert after(*errors) == "; ".join(errors[-3:])


def test_ordinary_lines_are_reported_as_such() -> None:
    summary = after(*INFO, "")
    assert summary == f"it logged no error; its last lines are: {'; '.join(INFO[-3:])}"


def test_empty_stderr_is_reported() -> None:
    assert after() == "it wrote nothing to standard error"
