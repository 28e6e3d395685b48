"""A blocked or full standard error drops lines and has no other effect."""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor

from mooncake_proxy.ops.background_stderr import MAX_QUEUED_BYTES, BackgroundStderr

LINE = "x" * 999 + "\n"


def test_output_keeps_its_order() -> None:
    reader, writer = os.pipe()
    stream = BackgroundStderr(writer)
    for number in range(100):
        stream.write(f"{number}\n")
    stream.drain(5.0)
    os.close(writer)
    with open(reader, "rb") as out:
        assert out.read().split() == [b"%d" % number for number in range(100)]


def test_blocked_reader_drops_lines_without_blocking() -> None:
    reader, writer = os.pipe()
    stream = BackgroundStderr(writer)
    for _ in range(3 * MAX_QUEUED_BYTES // len(LINE)):
        stream.write(LINE)  # would block for ever, since nothing reads
    with open(reader, "rb") as out, ThreadPoolExecutor() as pool:
        reading = pool.submit(out.read)
        stream.write("last\n")
        stream.drain(30.0)
        os.close(writer)
        reported = re.findall(rb"(\d+) log lines were dropped", reading.result())
    # it writes one queue and fills the other
    assert stream.num_dropped + sum(map(int, reported)) >= MAX_QUEUED_BYTES // len(LINE) // 2


def test_full_disk_is_tolerated() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = BackgroundStderr(full)
    stream.write("lost\n")
    while not stream.num_dropped:
        time.sleep(0.001)
    stream.drain(5.0)
    os.close(full)
