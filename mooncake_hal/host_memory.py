"""How much host memory this process may use; imports the standard library only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def memory_bytes() -> tuple[int, int]:
    """Return (available, total) bytes: the machine's, or those of this process's control group if
    its limit is lower."""
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
    """Return (limit, used) bytes of the control group, v1 or v2, that leaves the least: this
    process's own or one of its parents; (None, 0) if there is no limit.

    Reclaimable file pages don't count as used: weights that were read stay in the page cache."""
    found = []
    for limit_file, used_file, group in _group_files():
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            limit, used = (
                int((group / limit_file).read_text()),
                int((group / used_file).read_text()),
            )
            found.append((limit, max(used - _file_pages(group), 0)))
    if not found:
        return None, 0
    return min(found, key=lambda group: group[0] - group[1])


def _group_files() -> Iterator[tuple[str, str, Path]]:
    """Yield (limit file, usage file, directory) for this process's control group and its parents;
    the files need not exist."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    lines.append("0::/")  # without a cgroup namespace, the path in a container is the host's
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = _CGROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        for each in (group, *group.parents):
            yield (*files, each)
            if each == root:
                break


def _file_pages(group: Path) -> int:
    """Bytes of a group's file pages, which the kernel can reclaim."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(
        int(fields.get(f"total_{name}", fields.get(name, 0)))
        for name in ("inactive_file", "active_file")
    )
