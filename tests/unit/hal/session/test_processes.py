"""Process identities: whether a process has ended, and when that cannot be observed."""

import os
import select
import signal
import subprocess
import sys

import msgspec
import pytest

from mooncake_hal.session import processes
from mooncake_hal.session.processes import open_process, start_time, this_process

WAIT_MS = 60_000


@pytest.fixture
def other():
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from mooncake_hal.session.processes import this_process; from msgspec import json\n"
            "print(json.encode(this_process()).decode(), flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    name = msgspec.json.decode(child.stdout.readline(), type=processes.ProcessName)
    yield child, name
    child.kill()
    child.communicate()


def has_ended(descriptor, timeout_ms=0):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def test_process_is_identified_by_its_start_time():
    assert start_time(os.getpid()) == this_process().started
    assert start_time(2**22 + 1) is None


def test_stopped_process_has_not_ended_and_killed_one_has(other):
    child, name = other
    descriptor = open_process(name)
    assert descriptor is not None
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(descriptor)
    child.kill()
    assert has_ended(descriptor, WAIT_MS)
    os.close(descriptor)
    assert open_process(name) is None, "a zombie no longer accesses memory"
    child.wait()
    assert open_process(name) is None


def test_reused_pid_is_another_process():
    mine = this_process()
    assert open_process(msgspec.structs.replace(mine, started=mine.started - 1)) is None


def test_invisible_process_is_not_assumed_to_have_ended(monkeypatch):
    elsewhere = msgspec.structs.replace(this_process(), host="another kernel")
    with pytest.raises(OSError, match="another kernel"):
        open_process(elsewhere)
    monkeypatch.setattr(processes, "start_time", lambda pid: None)
    with pytest.raises(OSError, match="/proc does not show process"):
        open_process(this_process())
    monkeypatch.setattr(processes, "_SYS_PIDFD_OPEN", 100_000)
    with pytest.raises(OSError, match="can't be watched: Function not implemented"):
        open_process(this_process())


def test_unknown_host_matches_no_process(monkeypatch):
    def hidden(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "readlink", hidden)
    nameless = this_process()
    assert nameless.host == ""
    with pytest.raises(OSError, match="is of ''"):
        open_process(nameless)
