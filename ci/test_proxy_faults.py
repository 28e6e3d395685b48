"""Runs all process-level tests of the proxy, including the storm of 2,000 streams.

python ci/test_proxy_faults.py [pytest flags]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the tests; returns pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "tests/integration/proxy", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
