"""``python -m mooncake_kv``."""

import sys

from mooncake_kv.cli import main

if __name__ == "__main__":
    sys.exit(main())
