"""The memory of a store on hosts that lack what it would like to have."""

import errno
import mmap

from mooncake_kv.store import arena_memory
from mooncake_kv.store.arena_memory import ArenaMemory


def test_store_starts_on_a_kernel_without_huge_pages(monkeypatch):
    class Mapping(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(arena_memory.mmap, "mmap", Mapping)
    memory = ArenaMemory(1 << 20)
    memory.view(0, 4)[:] = b"abcd"
    assert bytes(memory.view(0, 4)) == b"abcd"
    memory.close()
