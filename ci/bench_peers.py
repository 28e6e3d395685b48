"""Runs one third-party transfer engine for ci/bench_transfer.py, in that engine's environment.

python bench_peers.py mooncake|nixl SIZE   reads JSON lines and answers each with one line:
{"shape": [total, piece], "operation": "read"} prepares a transfer, {"move": 1} runs it once,
{"cpu": 1} returns the CPU seconds of both processes. With a third argument it is the remote
process, which only serves. Requires numpy and the engine, and nothing from this repository.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import resource
import subprocess
import sys
import time

import numpy as np

TIMEOUT_S = 120.0
MOONCAKE_BATCH = 1024
"""Pieces per batch. Mooncake's queue per peer rejects 4,096 at once, and sometimes 2,048."""


def allocate(size):
    area = mmap.mmap(-1, size)
    content = np.frombuffer(area, np.uint8)
    content[:] = 1
    return content, content.ctypes.data


def own_cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Mooncake:
    """mooncake-transfer-engine over TCP, with the connection pool that scattered pieces need."""

    def __init__(self, size, _):
        os.environ["MC_TCP_ENABLE_CONNECTION_POOL"] = "1"
        os.environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] = "1000000"
        os.environ["MC_FORCE_TCP"] = "1"
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("mooncake-transfer-engine did not initialise")
        self.content, self.base = allocate(size)
        if self.engine.register_memory(self.base, size):
            raise RuntimeError("mooncake-transfer-engine did not register memory")
        self.blob = f"127.0.0.1:{self.engine.get_rpc_port()}"

    def connect(self, blob, base, size):
        self.session, self.remote = blob, base

    def prepare(self, near, far, piece, operation):
        local = [int(a) for a in near + self.base]
        remote = [int(a) for a in far + self.remote]
        sizes = [piece] * len(local)
        call = getattr(self.engine, f"batch_transfer_sync_{operation}")

        def move():
            for at in range(0, len(local), MOONCAKE_BATCH):
                part = slice(at, at + MOONCAKE_BATCH)
                failed = call(self.session, local[part], remote[part], sizes[part])
                if failed:
                    raise RuntimeError(f"batch_transfer_sync_{operation} returned {failed}")

        return move


class Nixl:
    """NIXL with UCX restricted to TCP."""

    def __init__(self, size, name):
        os.environ["UCX_TLS"] = "tcp"
        os.environ["UCX_NET_DEVICES"] = "lo"
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.content, self.base = allocate(size)
        self.agent.register_memory([(self.base, size, 0, "")], "DRAM")
        self.blob = base64.b64encode(self.agent.get_agent_metadata()).decode()

    def connect(self, blob, base, size):
        self.other = self.agent.add_remote_agent(base64.b64decode(blob))
        self.remote = base

    def prepare(self, near, far, piece, operation):
        count = len(near)

        def rows(offsets, base):
            return np.stack(
                [offsets + base, np.full(count, piece), np.zeros(count)], axis=1
            ).astype(np.uint64)

        local = self.agent.get_xfer_descs(rows(near, self.base), "DRAM")
        remote = self.agent.get_xfer_descs(rows(far, self.remote), "DRAM")
        handle = self.agent.initialize_xfer(operation.upper(), local, remote, self.other)

        def move():
            state = self.agent.transfer(handle)
            deadline = time.monotonic() + TIMEOUT_S
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
                if time.monotonic() > deadline:
                    raise RuntimeError("the transfer did not complete")
            if state != "DONE":
                raise RuntimeError(f"the transfer failed with state {state}")

        return move


ENGINES = {"mooncake": Mooncake, "nixl": Nixl}


def answer(**fields):
    sys.__stdout__.write("@" + json.dumps(fields) + "\n")
    sys.__stdout__.flush()


def receive(stream):
    """Read the next answer, skipping other lines that engines print."""
    for line in stream:
        if line.startswith("@"):
            return json.loads(line[1:])
    raise RuntimeError("the remote process exited")


def serve(engine):
    answer(blob=engine.blob, base=engine.base)
    for _ in sys.stdin:
        answer(cpu=own_cpu_s())


def drive(engine, name, size):
    command = [sys.executable, __file__, name, str(size), "serve"]
    pipe = subprocess.PIPE
    other = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    opened = receive(other.stdout)
    engine.connect(opened["blob"], opened["base"], size)
    answer(ready=True)
    move = None
    for line in sys.stdin:
        command = json.loads(line)
        if "shape" in command:
            total, piece = command["shape"]
            rng = np.random.default_rng(1)
            near, far = (rng.permutation(total // piece) * piece for _ in range(2))
            move = engine.prepare(near, far, piece, command["operation"])
            answer()
        elif "move" in command:
            try:
                move()
                answer()
            except RuntimeError as exc:
                answer(error=str(exc))
        else:
            other.stdin.write("cpu\n")
            other.stdin.flush()
            answer(cpu=own_cpu_s() + receive(other.stdout)["cpu"])
    other.stdin.close()
    other.wait()


def main():
    name, size = sys.argv[1], int(sys.argv[2])
    serving = len(sys.argv) > 3
    engine = ENGINES[name](size, "target" if serving else "initiator")
    serve(engine) if serving else drive(engine, name, size)
    sys.stdout.flush()
    os._exit(0)  # engines' own threads may outlive main


if __name__ == "__main__":
    main()
