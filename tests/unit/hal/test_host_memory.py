"""Available memory under control groups of both versions: the tightest enclosing limit counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_hal import host_memory

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")
UNLIMITED = {V1: str((1 << 63) - 4096), V2: "max"}


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control group directory, while this process is in no group."""
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "cgroup"


def group(path: Path, version: tuple[str, str, str], limit: object, used: int, files: int) -> None:
    """Create a control group whose page cache has ``files`` bytes."""
    path.mkdir(parents=True)
    limit_file, used_file, prefix = version
    (path / limit_file).write_text(f"{limit}\n")
    (path / used_file).write_text(f"{used}\n")
    stat = f"anon 1\nactive_file 1\n{prefix}inactive_file {files - 1}\n{prefix}active_file 1\n"
    (path / "memory.stat").write_text(stat)


def test_no_limit_without_a_control_group(cgroups: Path) -> None:
    assert host_memory._cgroup_bytes() == (None, 0)


@pytest.mark.parametrize("version", [V1, V2])
def test_own_group_and_its_ancestors_count(cgroups: Path, version: tuple[str, str, str]) -> None:
    root = cgroups / "memory" if version is V1 else cgroups
    group(root, version, UNLIMITED[version], 900, 100)
    group(root / "pod", version, 1000, 700, 300)
    group(root / "pod" / "engine", version, 800, 100, 50)
    controllers = "4:cpu,memory:" if version is V1 else "0::"
    host_memory._OWN_CGROUPS.write_text(f"9:name=systemd:/other\n{controllers}/pod/engine\n")
    assert host_memory._cgroup_bytes() == (1000, 400)


@pytest.mark.parametrize("version", [V1, V2])
def test_container_uses_the_root_group_if_its_path_is_hidden(
    cgroups: Path, version: tuple[str, str, str]
) -> None:
    group(cgroups / "memory" if version is V1 else cgroups, version, 1000, 700, 300)
    controllers = "4:memory:" if version is V1 else "0::"
    host_memory._OWN_CGROUPS.write_text(f"{controllers}/docker/0123\n")
    assert host_memory._cgroup_bytes() == (1000, 400)


def test_available_memory_follows_the_group(cgroups: Path) -> None:
    group(cgroups, V2, 1 << 20, 1 << 19, 1 << 18)
    assert host_memory.memory_bytes() == ((1 << 20) - (1 << 18), 1 << 20)
