"""Runs one third-party KV store for ci/bench_pool.py, in that store's environment.

python bench_pool_peers.py mooncake-own|mooncake-other|lmcache   reads JSON lines:
{"shape": [count, nbytes]} prepares, {"put": 1} and {"get": 1} move all objects once and answer with
the seconds, {"probe": 1} looks up 64 keys, {"cpu": 1} returns the CPU seconds of all its processes.
Requires numpy and the store, and nothing from this repository.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZE = 256 << 20
SEGMENT = 1 << 30
START_S = 60.0


def allocate(size):
    area = mmap.mmap(-1, size)
    content = np.frombuffer(area, np.uint8)
    content[:] = 1
    return content


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def join(master, segment_bytes):
    """Create a client of a Mooncake Store."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master):
        raise RuntimeError("Mooncake Store's client setup failed")
    return store


class Mooncake:
    """Mooncake Store over tcp, with the segment in this process or in another one."""

    def __init__(self, is_own):
        os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")
        port = free_port()
        program = Path(sys.executable).parent / "mooncake_master"
        command = [program, f"-rpc_port={port}", f"-metrics_port={free_port()}"]
        self.children = [
            subprocess.Popen(
                [*command, "-enable_metric_reporting=false"],
                stdout=sys.stderr,
            )
        ]
        deadline = time.monotonic() + START_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline:
                raise RuntimeError("mooncake_master does not listen")
            time.sleep(0.1)
        master = f"127.0.0.1:{port}"
        if not is_own:
            serving = [sys.executable, __file__, "serve", master]
            pipe = subprocess.PIPE
            self.children.append(subprocess.Popen(serving, stdin=pipe, stdout=pipe, text=True))
            for line in self.children[-1].stdout:
                if line.startswith("@"):
                    break
        self.store = join(master, SEGMENT if is_own else 0)
        self.content = allocate(SIZE)
        self.base = self.content.ctypes.data
        if self.store.register_buffer(self.base, SIZE):
            raise RuntimeError("Mooncake Store did not register memory")
        self.round = 0

    def prepare(self, count, nbytes):
        self.sizes = [nbytes] * count
        self.pointers = [self.base + i * nbytes for i in range(count)]
        self.keys = []

    def put(self):
        if self.keys:
            for key in self.keys:
                self.store.remove(key, True)
        self.round += 1
        self.keys = [f"{self.round}-{i}" for i in range(len(self.sizes))]
        began = time.perf_counter()
        status = self.store.batch_put_from(self.keys, self.pointers, self.sizes)
        elapsed = time.perf_counter() - began
        if any(status):
            raise RuntimeError(f"batch_put_from returned {sorted(set(status))}")
        return elapsed

    def get(self):
        began = time.perf_counter()
        status = self.store.batch_get_into(self.keys, self.pointers, self.sizes)
        elapsed = time.perf_counter() - began
        if status != self.sizes:
            raise RuntimeError(f"batch_get_into returned {sorted(set(status))}")
        return elapsed

    def probe(self):
        keys = (self.keys * 64)[:64]
        began = time.perf_counter()
        self.store.batch_is_exist(keys)
        return time.perf_counter() - began

    def cpu(self):
        return own_cpu_s() + sum(cpu_s(child.pid) for child in self.children)

    def close(self):
        for child in self.children:
            child.kill()
            child.wait()


class LMCache:
    """LMCache's local CPU backend, which copies objects into and out of this process's memory."""

    def __init__(self):
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.torch, self.key_of, self.format = torch, CacheEngineKey, MemoryFormat.KV_2LTD
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=SEGMENT / (1 << 30), chunk_size=256
        )
        shape = (4, 2, 256, 8, 64)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
        self.backend = LocalCPUBackend(config, metadata, "cpu")
        self.content = torch.from_numpy(allocate(SIZE))
        self.round = 0

    def prepare(self, count, nbytes):
        self.parts = [
            self.content[i * nbytes : (i + 1) * nbytes].view(self.torch.bfloat16)
            for i in range(count)
        ]
        self.shape = self.torch.Size([2, 1, nbytes // 4, 1])
        self.keys = []

    def put(self):
        for key in self.keys:
            self.backend.remove(key)
        self.round += 1
        self.keys = [
            self.key_of("bench", 1, 0, self.round * 100_000 + i, self.torch.bfloat16)
            for i in range(len(self.parts))
        ]
        began = time.perf_counter()
        objects = []
        for part in self.parts:
            found = self.backend.allocate(self.shape, self.torch.bfloat16, self.format)
            if found is None:
                raise RuntimeError("allocate returned None")
            found.tensor.view(-1).copy_(part)
            objects.append(found)
        self.backend.batched_submit_put_task(self.keys, objects)
        elapsed = time.perf_counter() - began
        for found in objects:
            found.ref_count_down()
        return elapsed

    def get(self):
        began = time.perf_counter()
        for key, part in zip(self.keys, self.parts, strict=True):
            found = self.backend.get_blocking(key)
            part.copy_(found.tensor.view(-1))
            found.ref_count_down()
        return time.perf_counter() - began

    def probe(self):
        keys = (self.keys * 64)[:64]
        began = time.perf_counter()
        for key in keys:
            self.backend.contains(key)
        return time.perf_counter() - began

    def cpu(self):
        return own_cpu_s()

    def close(self):
        """Nothing to do: its memory is freed with the process."""


PEERS = {
    "mooncake-own": lambda: Mooncake(True),
    "mooncake-other": lambda: Mooncake(False),
    "lmcache": LMCache,
}


def answer(**fields):
    sys.__stdout__.write("@" + json.dumps(fields) + "\n")
    sys.__stdout__.flush()


def respond(peer, question):
    if "shape" in question:
        peer.prepare(*question["shape"])
        return {}
    (name,) = question
    calls = {"put": peer.put, "get": peer.get, "probe": peer.probe, "cpu": peer.cpu}
    return {"seconds": calls[name]()}


def serve(master):
    """Main of the process that provides the pool's memory."""
    store = join(master, SEGMENT)
    answer(ready=True)
    sys.stdin.read()
    store.close()


def main():
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
        os._exit(0)
    peer = PEERS[sys.argv[1]]()
    answer(ready=True)
    try:
        for line in sys.stdin:
            try:
                answer(**respond(peer, json.loads(line)))
            except RuntimeError as exc:
                answer(error=str(exc))
    finally:
        peer.close()
    os._exit(0)  # engines' own threads may outlive main


if __name__ == "__main__":
    main()
