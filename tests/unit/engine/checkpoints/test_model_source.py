"""Models by path and by name: downloaded once, resumed, and errors of one line each."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model_hub import COMMIT, ModelHub, running_hub

from mooncake_engine.checkpoints.model_source import HubModel, find_model, read_hub_name
from mooncake_engine.errors import ConfigError, DownloadFailed

TINY = Path("examples/tiny-llama").resolve()
WEIGHTS = "model.safetensors"
MIB = 1 << 20
FETCH = (
    "import sys; from mooncake_engine.checkpoints.model_source import find_model; "
    "print(find_model(sys.argv[1]).directory)"
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ModelHub]:
    other = tmp_path / "quantised"
    other.mkdir()
    (other / "README.md").write_text("no model")
    with running_hub({"acme/tiny": TINY, "acme/empty": other}) as hub:
        yield hub


class Fetcher:
    """Fetches models in a child process, because the library reads its settings at import."""

    def __init__(self, hub: ModelHub, home: Path) -> None:
        self.home = home
        self._env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
        self._env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._env["HF_HUB_OFFLINE"] = "0"  # all other tests run offline

    def start(self, name: str, **env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", FETCH, name]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env={**self._env, **env}, stdout=pipe, stderr=pipe, text=True)

    def directory(self, name: str, **env: str) -> Path:
        out, err = self.start(name, **env).communicate(timeout=60)
        assert out, err
        return Path(out.strip())

    def error(self, name: str, **env: str) -> str:
        """Return the last line of the traceback."""
        out, err = self.start(name, **env).communicate(timeout=60)
        assert not out, out
        return err.strip().splitlines()[-1]


@pytest.fixture
def fetcher(hub: ModelHub, tmp_path: Path) -> Fetcher:
    return Fetcher(hub, tmp_path / "home")


def fetched_once(hub: ModelHub) -> bool:
    wanted = {p.name: p.stat().st_size for p in TINY.iterdir() if p.suffix in (".json", ".txt")}
    return dict(hub.sent) == wanted | {WEIGHTS: (TINY / WEIGHTS).stat().st_size}


def test_two_processes_fetch_every_byte_once_and_later_none(
    hub: ModelHub, fetcher: Fetcher
) -> None:
    both = [fetcher.start("acme/tiny"), fetcher.start("acme/tiny@v1")]
    found = {Path(process.communicate(timeout=60)[0].strip()) for process in both}
    assert len(found) == 1
    (directory,) = found
    assert directory.name == COMMIT
    assert (directory / WEIGHTS).read_bytes() == (TINY / WEIGHTS).read_bytes()
    assert fetched_once(hub), hub.sent
    assert fetcher.directory("acme/tiny", HF_HUB_OFFLINE="1") == directory
    assert fetcher.directory("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9") == directory
    assert fetched_once(hub)


@pytest.fixture
def large(hub: ModelHub, tmp_path: Path) -> bytes:
    """The weights of ``acme/large``: the library keeps a partial download in units of 10 MiB."""
    directory = tmp_path / "large"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    weights = random.Random(0).randbytes(24 * MIB)
    (directory / WEIGHTS).write_bytes(weights)
    hub.repositories["acme/large"] = directory
    return weights


def test_interrupted_download_is_resumed(hub: ModelHub, fetcher: Fetcher, large: bytes) -> None:
    hub.cut_after[WEIGHTS] = 21 * MIB
    directory = fetcher.directory("acme/large")
    assert (directory / WEIGHTS).read_bytes() == large
    assert hub.resumed == [20 * MIB]
    assert hub.sent[WEIGHTS] == 25 * MIB


def test_complete_files_of_a_killed_download_are_reused(
    hub: ModelHub, fetcher: Fetcher, large: bytes
) -> None:
    hub.stall_after[WEIGHTS] = 21 * MIB
    with fetcher.start("acme/large") as process:
        while hub.sent[WEIGHTS] < 21 * MIB:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.3)
        process.kill()
    directory = fetcher.directory("acme/large")
    assert (directory / WEIGHTS).read_bytes() == large
    assert hub.sent["config.json"] == len("{}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acme/none", "ConfigError: no directory acme/none here, and no model of that name at"),
        ("acme/tiny@v9", "has no revision 'v9'"),
        ("acme/empty", "ConfigError: acme/empty has no config.json with *.safetensors; if it"),
        ("acme/empty:Q4_K_M", "must have one GGUF file of quantisation Q4_K_M, found none"),
    ],
)
def test_missing_model_is_reported_in_one_line(fetcher: Fetcher, name: str, message: str) -> None:
    assert message in fetcher.error(name)


def test_gated_model_error_links_to_its_terms(hub: ModelHub, fetcher: Fetcher) -> None:
    hub.gated.add("acme/tiny")
    message = fetcher.error("acme/tiny")
    assert (
        f"acme/tiny is gated: accept its terms at {hub.url}/acme/tiny, then set HF_TOKEN" in message
    )


def test_missing_local_copy_is_reported_offline(fetcher: Fetcher) -> None:
    assert "and HF_HUB_OFFLINE is set" in fetcher.error("acme/tiny", HF_HUB_OFFLINE="1")
    nowhere = "http://127.0.0.1:9"
    assert f"{nowhere} can't be reached" in fetcher.error("acme/tiny", HF_ENDPOINT=nowhere)


def test_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        DownloadFailed, match=r"the disk of .* is full, and acme/tiny is incomplete"
    ):
        find_model("acme/tiny")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/1", HubModel("a/b", "refs/pr/1")),
        ("a/b.c:Q4_K_M@v1", HubModel("a/b.c", "v1", "Q4_K_M")),
        ("modelscope:a/b", HubModel("a/b", is_modelscope=True)),
        ("a/b/c", None),
        ("./a", None),
        ("../a", None),
        ("a", None),
        ("a b/c", None),
    ],
)
def test_hub_names_are_parsed(text: str, wanted: HubModel | None) -> None:
    assert read_hub_name(text) == wanted


def test_local_paths_are_found(tmp_path: Path) -> None:
    assert find_model(TINY).name == "tiny-llama"
    with pytest.raises(ConfigError, match=f"no config.json in {tmp_path}$"):
        find_model(tmp_path)
    with pytest.raises(ConfigError, match="GGUF file, or ORG/NAME"):
        find_model("/no/model")
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ConfigError, match="and 2 GGUF files: name one of them"):
        find_model(tmp_path)
