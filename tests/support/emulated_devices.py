"""Devices for instances in other processes: a kind is an environment and ``serve`` options.

An emulated GPU and an emulated NPU can't both be in one process: each replaces what torch itself
would load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
MYCHIP = ROOT / "docs" / "examples" / "mychip"
_NPU = SUPPORT / "npu_emulation"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device that an instance may run on.

    Args:
        backend: its name.
        block_sizes: those that fleets of several kinds are tested with.
        folders: prepended to PYTHONPATH.
        variables: further environment variables.
        options: of ``mooncake-engine serve``.
    """

    backend: str
    block_sizes: tuple[int, ...]
    folders: tuple[Path, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of an instance's processes."""
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([*map(str, self.folders), *filter(None, given)])
        return {**self.variables, "PYTHONPATH": path}

    def serve_options(self, block_size: int, tp_size: int = 1) -> Sequence[str]:
        """The ``serve`` options of an instance on it."""
        sizes = ("--block-size", str(block_size), "--tp-size", str(tp_size))
        return ("--backend", self.backend, *sizes, *self.options)


KINDS: dict[str, DeviceKind] = {
    "cpu": DeviceKind("cpu", (16, 128)),
    "cuda": DeviceKind(
        "cuda",
        (16, 128),
        (SUPPORT / "gpu_emulation", SUPPORT.parent),
        {"TRITON_INTERPRET": "1", "MOONCAKE_HAL_BLOCK": "cuda"},
    ),
    "npu": DeviceKind(
        "ascend",
        (128,),
        (_NPU,),
        {"MOONCAKE_HAL_ASCEND_ROOT": str(_NPU / "machine"), "ASCEND_HOME_PATH": ""},
        ("--piecewise-graph-max-tokens", "32"),  # capturing 512 takes half a second more
    ),
}
"""Kinds by the names that tables use."""
GENERATIONS = {
    "a3": replace(
        KINDS["npu"], variables={**KINDS["npu"].variables, "NPU_EMULATION_GENERATION": "A3"}
    ),
}
"""Further kinds of one vendor: ``npu`` is an A2."""
ALL_KINDS = KINDS | GENERATIONS


def mychip(folder: Path) -> DeviceKind:
    """The example backend of docs/hardware.md.

    Args:
        folder: gets the metadata that pip would write on installation.
    """
    install_example(folder)
    return DeviceKind("mychip", (16, 128), (folder, MYCHIP))


def install_example(folder: Path) -> None:
    """Write the example's metadata as pip would, for processes with the folder on PYTHONPATH."""
    [entry_points] = [
        section
        for section in (MYCHIP / "pyproject.toml").read_text().split("\n\n")
        if section.startswith("[project.entry-points.mooncake_hal]")
    ]
    metadata = folder / "mooncake_hal_mychip-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mooncake-hal-mychip\nVersion: 0.1.0\n"
    )
    lines = [line.replace('"', "") for line in entry_points.splitlines()[1:]]
    (metadata / "entry_points.txt").write_text("\n".join(["[mooncake_hal]", *lines, ""]))
