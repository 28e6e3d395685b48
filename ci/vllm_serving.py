"""Starts and stops vLLM instances (the CPU build), our proxy and our engine for tests."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_environment import CACHE, DidNotStart, install, run

ROOT = Path(__file__).resolve().parent.parent
PROXY_LOG = CACHE / "vllm-proxy.log"
MODEL = CACHE / "tiny-llama-wide-heads"
EXAMPLE = ROOT / "examples" / "tiny-llama"
OF_EXAMPLE = (
    *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "2048", "--max-num-seqs", "8"),
)
"""Options of ``vllm serve`` for the example model when its tokens are compared."""
CONNECTORS = {"pull": "HalPullConnector", "push": "HalPushConnector"}
Json = dict[str, Any]
DESCENDANTS_END_S = 5.0
"""Seconds that a child's descendants have to end after it before they are killed."""
_random = random.SystemRandom()  # not seeded, so that processes choose different ports
_given_ports: set[int] = set()

# The smallest head size of vLLM's CPU attention is 32, the example's is 16. Heads are padded with
# zeros: each rotary pair j moves to index 2j, which has the same frequency there, and the queries
# are scaled to compensate for the smaller softmax scale.
WIDEN = """
import json, math, shutil, sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = map(Path, sys.argv[1:])
shutil.copytree(source, target, dirs_exist_ok=True)
config = json.loads((source / "config.json").read_text())
old, new = config["head_dim"], 2 * config["head_dim"]
pairs = torch.arange(old // 2) * 2
places = torch.cat([pairs, pairs + old])
weights = {name: weight.float() for name, weight in load_file(source / "model.safetensors").items()}
for name, weight in weights.items():
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        heads = weight.reshape(-1, old, weight.shape[1])
        wide = torch.zeros(heads.shape[0], new, weight.shape[1])
        wide[:, places] = heads * (math.sqrt(2) if "q_proj" in name else 1)
        weights[name] = wide.reshape(-1, weight.shape[1])
    elif "o_proj" in name:
        heads = weight.reshape(weight.shape[0], -1, old)
        wide = torch.zeros(weight.shape[0], heads.shape[1], new)
        wide[:, :, places] = heads
        weights[name] = wide.reshape(weight.shape[0], -1)
save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
config |= {"head_dim": new, "dtype": "float32"}
(target / "config.json").write_text(json.dumps(config))
"""


SLIDING_WINDOW = 64
OTHER_MODELS: dict[str, Json] = {
    # Two of three layers have a sliding window, as in Gemma 3.
    "sliding": {
        "classes": ("Gemma3ForCausalLM", "Gemma3TextConfig"),
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "sliding_window": SLIDING_WINDOW,
    },
    # DeepSeek's sizes, which vLLM's attention over latents requires on a CPU.
    "latent": {
        "classes": ("DeepseekV2ForCausalLM", "DeepseekV2Config"),
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 2,
    },
}
"""Configurations of other models by name. Weights are random, large enough to affect the output."""
MAKE_MODEL = """
import json, shutil, sys, torch, transformers
from pathlib import Path
source, target, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
target.mkdir(parents=True, exist_ok=True)
for file in source.glob("token*"):
    shutil.copy(file, target)
example = json.loads((source / "config.json").read_text())
model, config = (getattr(transformers, name) for name in settings.pop("classes"))
for name in ("vocab_size", "max_position_embeddings", "eos_token_id"):
    settings[name] = example[name]
torch.manual_seed(0)
model(
    config(
        **settings, hidden_size=128, intermediate_size=256, num_attention_heads=4,
        bos_token_id=None, initializer_range=0.3,
    )
).float().save_pretrained(target)
"""


def prepare_model(python: Path, name: str) -> Path:
    """Create one of the other models with the libraries of vLLM's venv; returns its folder."""
    folder = CACHE / f"tiny-{name}"
    if not (folder / "model.safetensors").exists():
        command = [python, "-c", MAKE_MODEL, EXAMPLE, folder, json.dumps(OTHER_MODELS[name])]
        run(command, f"making the {name} model")
    return folder


def prepare() -> Path:
    """Install vLLM and create the example model with wider heads; returns the interpreter."""
    python = install()
    if not (MODEL / "config.json").exists():
        run([python, "-c", WIDEN, EXAMPLE, MODEL], "widening the model's heads")
    return python


@dataclass(frozen=True)
class Launch:
    """Parameters of a vLLM instance.

    Args:
        python: interpreter of vLLM's environment.
        transfer: its ``--kv-transfer-config``.
        core: cores of its workers, in vLLM's format.
        log: file for its output.
        words: further arguments.
        environment: further environment variables.
        port: port of its API.
        model: folder of the model; by default the example with wider heads.
    """

    python: Path
    transfer: Json | None
    core: str
    log: Path
    words: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=lambda: free_port())
    model: Path | None = None

    @property
    def url(self) -> str:
        """URL of its API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the instance in a separate process group."""
        command = [
            *(self.python.parent / "vllm", "serve", self.model or MODEL),
            *("--host", "127.0.0.1", "--port", self.port),
            *(OF_EXAMPLE if self.model is None else ()),
            *self.words,
        ]
        if self.transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Huge pages: peers read the KV over shm twice as fast.
            "THP_MEM_ALLOC_ENABLE": "1",
            # With a connector, the default would reserve both cores of a small machine.
            "VLLM_CPU_OMP_THREADS_BIND": self.core,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        variables = os.environ | settings | self.environment
        return start([str(word) for word in command], variables, self.log)


def transfer_config(role: str, flow: str, transports: list[str], **settings: object) -> Json:
    """The ``--kv-transfer-config`` for our connector."""
    extra: Json = {"transport": transports, "lease_seconds": 20}
    return {
        "kv_connector": CONNECTORS[flow],
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra | settings,
    }


def nixl_variables() -> dict[str, str]:
    """Environment variables for vLLM's NIXL connector over TCP and shared memory."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self,sm",
    }


def cores(first: int, size: int = 1) -> str:
    """One core for each worker, in vLLM's format."""
    number = os.cpu_count() or 1
    return "|".join(str((first + rank) % number) for rank in range(size))


@dataclass(frozen=True)
class RunningVllm:
    """A vLLM instance that was started.

    Args:
        url: URL of its API.
        log: its log file.
        child: its process.
    """

    url: str
    log: Path
    child: subprocess.Popen[bytes]

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Wait until it is healthy; raises DidNotStart like the function."""
        wait_until_healthy(self.url, self.log, timeout_s, [self.child])


@contextmanager
def serving(
    python: Path,
    transfer: Json | None,
    core: str,
    log: Path,
    *words: str,
    model: Path | None = None,
    **environment: str,
) -> Iterator[RunningVllm]:
    """Start one vLLM instance, which may not be ready yet. Arguments as in ``Launch``."""
    log.unlink(missing_ok=True)  # left by an earlier run
    launch = Launch(python, transfer, core, log, words, environment, model=model)
    child = launch.start()
    try:
        yield RunningVllm(launch.url, log, child)
    finally:
        stop(child)


@contextmanager
def proxying(
    prefill: str, decode: str, flow: str = "pull", *words: str, emits_first_token: bool = True
) -> Iterator[str]:
    """Start the proxy in front of two instances that are up; yields its URL."""
    port = free_port()
    child = start_proxy(prefill, decode, port, flow, *words, emits_first_token=emits_first_token)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, PROXY_LOG, 60, [child])
        yield url
    finally:
        stop(child)


def start_proxy(
    prefill: str, decode: str, port: int, flow: str, *words: str, emits_first_token: bool = True
) -> subprocess.Popen[bytes]:
    """Start the proxy in a separate process group."""
    pools = ["--prefill", prefill, "--decode", decode, "--flow", flow]
    pools += ["--decode-emits-first-token"] if emits_first_token else []
    command = [sys.executable, "-m", "mooncake_proxy", "--port", str(port), *pools, *words]
    return start(command, dict(os.environ), PROXY_LOG)


def start_engine(
    role: str, core: int, log: Path, *words: str, model: Path | None = None
) -> tuple[str, subprocess.Popen[bytes]]:
    """Start an instance of our own engine with the same model, on one core; returns its URL and
    process."""
    port = free_port()
    log.unlink(missing_ok=True)
    command = [
        *("taskset", "-c", cores(core)),
        *(sys.executable, "-m", "mooncake_engine.cli", "serve", "--model", str(model or MODEL)),
        *("--role", role, "--port", str(port), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--max-model-len", "2048", *words),
    ]
    child = start(command, os.environ | {"OMP_NUM_THREADS": "1"}, log)
    return f"http://127.0.0.1:{port}", child


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a child in a separate process group; its output is appended to the log."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def stop(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and its descendants. Those that end after the child, as Python's resource
    tracker does, have time to remove the shared memory that the others have left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all have ended already
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(20)
        deadline = time.monotonic() + DESCENDANTS_END_S
        while group_is_alive(child.pid) and time.monotonic() < deadline:
            time.sleep(0.02)


def group_is_alive(group: int) -> bool:
    """Whether any process of a group has not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def family(pid: int) -> list[int]:
    """Ids of a process's descendants."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            found += [int(child), *family(int(child))]
    return found


def title(pid: int) -> str:
    """The command line of a process, which a process may set as its title."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""  # it ended in the meantime


def free_port() -> int:
    """A free TCP port on which a child can listen a little later. It is below Linux's default
    ephemeral ports, so that no connection gets it meanwhile, and no other call returns it."""
    while True:
        port = _random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port


def wait_until_healthy(
    url: str, log: Path, timeout_s: float, needed: Sequence[subprocess.Popen[bytes]] = ()
) -> None:
    """Wait until an instance is healthy, as long as these processes live.

    Raises:
        DidNotStart: it is not healthy in time, or a process ended; with the last lines of the log.
    """
    print(f"-- waiting for {url}", flush=True)
    began = time.monotonic()
    deadline = began + timeout_s
    while time.monotonic() < deadline and all(child.poll() is None for child in needed):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(1)
    last = log.read_text("utf-8", "replace").splitlines()[-3:]
    took_s = time.monotonic() - began
    raise DidNotStart(f"{url} did not become healthy in {took_s:.0f} s: {' | '.join(last)}")
