#!/usr/bin/env python3
"""Regenerates the documentation's pictures of the proxy's page and bench's, on desktop and phone.

Serves the example model with a prefill and two decode instances, replays a trace twice, and takes
screenshots with headless Chromium. Exits 0 only if every picture is written and small enough for a
page of text, 77 if there is no Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.pd_processes import serving  # noqa: E402  # the path is set above
from support.programs import TINY_LLAMA, running  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
TRACE = Path("examples/trace.jsonl")
OBJECTIVES = ("--slo-ttft", "30", "--slo-tbt", "50")
MAX_BYTES = 150_000
BROWSER_S = 60.0
REPLAY_S = 240.0
# Width and height of the viewport.
SCREENS = {
    "live": {"wide": (1200, 1150), "phone": (390, 1500)},
    "bench": {"wide": (1200, 1500), "phone": (390, 1500)},
}


def main() -> int:
    """Take all pictures; returns the exit status."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("skipped: no Chromium on PATH (Debian's package is called chromium)")
        return 77
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with deployment() as url:
            replay(url, folder / "before", "--rate", "4")
            replay(url, folder / "bench", "--rate", "2", "--compare", str(folder / "before.json"))
            with subprocess.Popen(bench(url, folder / "beside", "--rate", "2"), cwd=ROOT) as beside:
                time.sleep(5.0)
                for name, size in SCREENS["live"].items():
                    take(browser, f"{url}/", f"live-page-{name}", size)
                beside.wait(REPLAY_S)
        page = (folder / "bench.html").as_uri()
        for name, size in SCREENS["bench"].items():
            take(browser, page, f"bench-page-{name}", size)
    too_large = [path.name for path in FOLDER.iterdir() if path.stat().st_size > MAX_BYTES]
    print(f"pictures: {', '.join(too_large)} too large" if too_large else "pictures: all written")
    return int(bool(too_large))


@contextmanager
def deployment() -> Iterator[str]:
    """A prefill and two decode instances behind a proxy; yields its URL."""
    with ExitStack() as stack:
        roles = ("prefill", "decode", "decode")
        served = [stack.enter_context(serving(TINY_LLAMA, role)) for role in roles]
        argv = ["--port", "0", "--policy", "prefix", *OBJECTIVES]
        for role, one in zip(roles, served, strict=True):
            argv += [f"--{role}", one.url]
        proxy = stack.enter_context(running("mooncake_proxy", *argv))
        yield proxy.wait_for("listens on").split()[-1]


def bench(url: str, out: Path, *options: str) -> list[str]:
    """The command that creates load for some tens of seconds and writes a page about it."""
    command = [sys.executable, "-m", "mooncake_engine.cli", "bench", str(TRACE), "--url", url]
    command += ["--model", "tiny-llama", "--block-tokens", "64", *OBJECTIVES]
    return [*command, "--out", str(out), *options]


def replay(url: str, out: Path, *options: str) -> None:
    """Run it."""
    subprocess.run(bench(url, out, *options), check=True, timeout=REPLAY_S, cwd=ROOT)


def take(browser: str, url: str, name: str, size: Sequence[int]) -> None:
    """One picture."""
    path = FOLDER / f"{name}.png"
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        flags += ["--hide-scrollbars", "--virtual-time-budget=4000"]
        flags += [f"--window-size={size[0]},{size[1]}", f"--screenshot={path}"]
        subprocess.run(
            [browser, *flags, url], check=True, timeout=BROWSER_S, stderr=subprocess.DEVNULL
        )
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
