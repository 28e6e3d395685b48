"""``python -m mooncake_engine``."""

import sys

from mooncake_engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
