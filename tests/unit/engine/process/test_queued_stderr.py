"""A blocked or full standard error costs an instance lines, and never blocks it."""

from __future__ import annotations

import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_engine.process.queued_stderr import (
    MAX_QUEUED_WRITES,
    MAX_WRITE_CHARACTERS,
    QueuedStderr,
    queued_stderr,
)

MORE_THAN_A_PIPE_HOLDS = "x" * 1000 + "\n"


def test_writes_are_forwarded_in_order() -> None:
    reader, writer = os.pipe()
    stream = QueuedStderr(writer)
    for number in range(100):
        stream.write(f"{number}\n")
    stream.drain(5.0)
    os.close(writer)
    with open(reader, "rb") as out:
        assert out.read().split() == [b"%d" % number for number in range(100)]


def test_unread_pipe_drops_lines_and_does_not_block() -> None:
    reader, writer = os.pipe()
    stream = QueuedStderr(writer)
    for _ in range(2 * MAX_QUEUED_WRITES):
        assert stream.write(MORE_THAN_A_PIPE_HOLDS) == len(MORE_THAN_A_PIPE_HOLDS)
    with open(reader, "rb") as out, ThreadPoolExecutor() as pool:
        reading = pool.submit(out.read)
        stream.drain(30.0)
        os.close(writer)
        reported = re.findall(rb"(\d+) writes to standard error were dropped", reading.result())
    assert stream.num_dropped + sum(map(int, reported)) >= MAX_QUEUED_WRITES // 2


def test_write_errors_are_counted() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = QueuedStderr(full)
    stream.write("lost\n")
    stream.drain(5.0)
    os.close(full)
    assert stream.num_dropped == 1


def test_single_write_is_bounded() -> None:
    reader, writer = os.pipe()
    stream = QueuedStderr(writer)
    stream.write("x" * (2 * MAX_WRITE_CHARACTERS))
    stream.drain(5.0)
    os.close(writer)
    with open(reader, "rb") as out:
        assert len(out.read()) == MAX_WRITE_CHARACTERS


def test_logging_is_redirected_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(plain := sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with queued_stderr() as stream:
        assert handler.stream is stream
        assert sys.stderr is stream
    assert handler.stream is plain
    assert sys.stderr is plain
