"""Runs ``python -m MODULE`` in this process with a disk whose writes hang while FILE exists.

python hanging_writes.py FILE python -m MODULE ARGUMENT...
"""

import os
import runpy
import sys
import time


def main():
    hangs, _, _, module, *arguments = sys.argv[1:]
    write = os.pwritev

    def hanging(file, buffers, offset):
        while os.path.exists(hangs):
            time.sleep(0.01)
        return write(file, buffers, offset)

    os.pwritev = hanging
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
