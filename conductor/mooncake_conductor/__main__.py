"""`python -m mooncake_conductor` runs `mooncake-conductor`."""

from __future__ import annotations

import sys

from mooncake_conductor.cli import main

if __name__ == "__main__":
    sys.exit(main())
