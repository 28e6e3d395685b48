"""Information on this host's processor and memory; imports the standard library only, and reads
files on demand."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

# instruction sets that affect which kernels run or how they round, in the order of their names
_X86_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_ARM_SETS = ("asimd", "bf16", "sve")


@cache
def cpu_fields() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty if there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_name() -> str:
    """Marketing name of the processor."""
    return cpu_fields().get("model name", platform.machine())


def generation(machine: str, flags: str) -> str:
    """The processor family as far as kernels differ, such as ``"x86_64+avx512_bf16+amx_bf16"``.

    Args:
        machine: architecture, as returned by ``platform.machine()``.
        flags: the processor's feature flags, separated by spaces.
    """
    known = _X86_SETS if machine == "x86_64" else _ARM_SETS
    present = set(flags.split())
    found = [name for name in known if name in present]
    # for kernels, each x86 set implies the ones before it; AMX is separate from AVX-512
    if machine == "x86_64":
        vector = [name for name in found if not name.startswith("amx")][-1:]
        found = vector + [name for name in found if name.startswith("amx")]
    return "+".join([machine, *found])


def this_generation() -> str:
    """The generation of this machine."""
    fields = cpu_fields()
    return generation(platform.machine(), fields.get("flags", fields.get("Features", "")))


def reset_peak_resident() -> None:
    """Restart the measurement of this process' peak resident memory.

    If the kernel does not allow that (in some containers), the peak remains that of the process'
    whole lifetime, which is never too small.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_resident_bytes() -> int:
    """This process' peak resident memory since ``reset_peak_resident``, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not report VmHWM in /proc/self/status")
