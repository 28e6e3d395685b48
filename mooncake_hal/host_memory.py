"""How much memory this host has for this process; standard library only."""

from __future__ import annotations

from pathlib import Path


def memory_bytes() -> tuple[int, int]:
    """(available, total) bytes of this process: the machine's, or its control group's if less."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key] = int(value.split()[0]) * 1024
    available, total = fields["MemAvailable"], fields["MemTotal"]
    limit, used = _cgroup_bytes()
    if limit is None or limit >= total:
        return available, total
    return min(available, max(limit - used, 0)), limit


def _cgroup_bytes() -> tuple[int | None, int]:
    """(limit, used) of the control group, version 2; (None, 0) where there is no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
    except OSError:
        return None, 0
    return (None, 0) if limit == "max" else (int(limit), used)
