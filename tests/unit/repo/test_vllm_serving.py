"""The instances that tests with vLLM start: their ports, and their end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from support.deploy import load_script

serving = load_script("vllm_serving")


def test_no_connection_and_no_other_child_gets_a_port() -> None:
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [serving.free_port() for _ in range(500)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < max(ephemeral, 32_000)  # unless this host's ephemeral ports begin below


HOLDER = """
import time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(60)
"""


def test_stopped_instance_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Python's resource tracker removes it, in a process of its own."""
    log = tmp_path / "log"
    child = serving.start([sys.executable, "-c", HOLDER], dict(os.environ), log)
    deadline = time.monotonic() + 60
    while not (name := log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Path("/dev/shm", name).is_file()
    serving.stop(child)
    assert not Path("/dev/shm", name).exists()
    assert not serving.group_is_alive(child.pid)
