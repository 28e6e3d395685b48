"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe_exit(status: int) -> str:
    """What a return code of a process means; a negative one is a signal's number."""
    if status >= 0:
        return f"exited with status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"
    return f"killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
