"""Runs a Python program without the system calls of systemd's set `@resources`:

    python system_call_filter.py ERRNO ARGUMENTS...

They fail with this error number; with 0 the program is killed, as units do without
`SystemCallErrorNumber`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

# mbind, set_mempolicy, migrate_pages, move_pages, ioprio_set, sched_setparam, sched_setscheduler,
# sched_setaffinity, setrlimit, setpriority, sched_setattr, set_mempolicy_home_node
RESOURCES = {
    "x86_64": (237, 238, 256, 279, 251, 142, 144, 203, 160, 141, 314, 450),
    "aarch64": (235, 237, 238, 239, 30, 118, 119, 122, 164, 140, 274, 450),
}
# From <linux/prctl.h>, <linux/seccomp.h> and <linux/bpf_common.h>.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def refuse(numbers: tuple[int, ...], error: int) -> None:
    """Refuse system calls in this process and in what it executes."""
    program = [(LOAD_WORD, 0, 0, 0)]  # the number of the call
    for position, number in enumerate(numbers):
        program.append((JUMP_IF_EQUAL, len(numbers) - position, 0, number))
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | error if error else KILL)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    wanted = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, wanted)):
        if libc.prctl(*arguments, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse(RESOURCES[platform.machine()], int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
