"""``python -m mooncake_hal``."""

import sys

from mooncake_hal.cli import main

if __name__ == "__main__":
    sys.exit(main())
