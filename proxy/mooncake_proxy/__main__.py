"""`python -m mooncake_proxy` runs `mooncake-proxy`."""

import sys

from mooncake_proxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
