"""How a host's own interpreter finds the project as if it were installed: nothing is installed.

Metadata of each distribution is written into a folder, sources come from the tree, and wheels for
what the interpreter lacks are unpacked into another folder; all three are on PYTHONPATH. Standard
library only.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import shutil
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = (".", "api", "backends/cpu", "backends/cuda", "backends/ascend", "kv", "conductor")
_SOURCES += ("engine", "proxy", "tests")
_PROJECTS = (".", "api", "backends/cuda", "backends/ascend", "kv", "conductor", "engine", "proxy")


def host_environment(out: Path, wheels: Path | None) -> dict[str, str]:
    """Variables with which this interpreter finds the project as if it were installed.

    Args:
        out: where what it needs is written.
        wheels: for what this interpreter lacks.
    """
    metadata, site = out / "host" / "metadata", out / "host" / "site"
    for project in _PROJECTS:
        write_metadata(ROOT / project / "pyproject.toml", metadata)
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_if_missing(wheel, site)
    paths = [metadata, *((ROOT / source).resolve() for source in _SOURCES), site]
    return {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "host" / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # what another torch, transformers or Python warns of is shown, and is no failure
        "PYTEST_ADDOPTS": "-W default -p no:cacheprovider",
    }


def write_metadata(pyproject: Path, target: Path) -> Path:
    """What ``importlib.metadata`` reads of an installed distribution: entry points, version. Python
    3.11 or newer reads the file."""
    import tomllib

    project = tomllib.loads(pyproject.read_text())["project"]
    name, version = project["name"], project["version"]
    info = target / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


def unpack_if_missing(wheel: Path, site: Path) -> bool:
    """Unpack a wheel, unless this interpreter has such a distribution; whether it was unpacked."""
    name = wheel.name.split("-")[0].replace("_", "-")
    try:
        importlib.metadata.version(name)
        return False
    except importlib.metadata.PackageNotFoundError:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        return True


def is_there(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a program, or a module of this interpreter, is found with these variables."""
    if shutil.which(name, path=environment.get("PATH")) is not None:
        return True
    if "-" in name:  # a program's name: no module is called so
        return False
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return importlib.machinery.PathFinder.find_spec(name, paths + sys.path) is not None
