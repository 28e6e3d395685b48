"""``make up MODEL=…`` takes a path, a hub's name, or one of the examples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def example_model(wanted: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "ci" / "example_model.py"), wanted]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("wanted", ["examples/tiny-llama", "docs", "Qwen/Qwen3-0.6B", "/none"])
def test_path_or_hub_name_is_passed_on(wanted: str) -> None:
    found = example_model(wanted)
    assert (found.returncode, found.stdout) == (0, f"{wanted}\n")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("smolm2", "'smolm2': did you mean smollm2?"),
        ("SmolLM2", "'SmolLM2': did you mean smollm2?"),
        ("gpt5", "or smollm2, got 'gpt5', which is no file or folder here"),
    ],
)
def test_misspelt_example_is_refused_with_the_nearest_one(wanted: str, words: str) -> None:
    found = example_model(wanted)
    assert (found.returncode, found.stdout) == (2, "")
    assert words in found.stderr
