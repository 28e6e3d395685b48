"""Peak memory of a process during an operation."""

from __future__ import annotations

from pathlib import Path


class PeakMemory:
    """Measures a process' peak; resets the peak that Linux keeps when it is created."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._mib("VmRSS")

    @property
    def growth_mib(self) -> float:
        """MiB from the start of the measurement to the peak since."""
        return self._mib("VmHWM") - self._before

    def _mib(self, field: str) -> float:
        [line] = [line for line in self._status.read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) / 1024
