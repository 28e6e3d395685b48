"""Makes the project importable by a host's own interpreter without installing anything.

Writes each distribution's metadata into one folder, and unpacks wheels of missing packages into
another. Both are put on PYTHONPATH, with the source tree. Standard library only.
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
    """Environment variables with which this interpreter finds the project as if it were installed.

    Args:
        out: folder for the metadata and the unpacked wheels.
        wheels: folder of wheels for packages that this interpreter lacks.
    """
    metadata, site = out / "host" / "metadata", out / "host" / "site"
    for project in _PROJECTS:
        write_metadata(ROOT / project / "pyproject.toml", metadata)
    if wheels is not None:
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_if_missing(wheel, site)
    paths = [metadata, *((ROOT / source).resolve() for source in _SOURCES), site]
    # what this interpreter was found to have may come from there
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited]),
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "host" / "triton")),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # warnings of other versions of torch, transformers or Python are shown, but are no failures
        "PYTEST_ADDOPTS": "-W default -p no:cacheprovider",
    }


def write_metadata(pyproject: Path, target: Path) -> Path:
    """Write a distribution's name, version and entry points for ``importlib.metadata``. Requires
    Python 3.11 or newer, to parse pyproject.toml."""
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
    """Unpack a wheel unless this interpreter has the distribution; returns whether it did."""
    name = wheel.name.split("-")[0].replace("_", "-")
    try:
        importlib.metadata.version(name)
        return False
    except importlib.metadata.PackageNotFoundError:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        return True


def is_there(name: str, environment: Mapping[str, str]) -> bool:
    """Whether a program or a module is found with these environment variables."""
    if shutil.which(name, path=environment.get("PATH")) is not None:
        return True
    if "-" in name:  # a program: module names have no hyphen
        return False
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return importlib.machinery.PathFinder.find_spec(name, paths + sys.path) is not None
