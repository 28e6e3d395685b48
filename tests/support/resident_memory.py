"""How much memory a process takes at its worst while something is done to it."""

from __future__ import annotations

from pathlib import Path


class PeakMemory:
    """Begins to measure a process; Linux keeps its peak, which starts anew here."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = self._mib("VmRSS")

    @property
    def growth_mib(self) -> float:
        """From then to its peak since."""
        return self._mib("VmHWM") - self._before

    def _mib(self, field: str) -> float:
        [line] = [line for line in self._status.read_text().splitlines() if line.startswith(field)]
        return int(line.split()[1]) / 1024
