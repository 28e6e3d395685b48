"""What ``bench_vllm.py`` measures: vLLM alone, pairs of it by connector, and our own engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_environment import CACHE, install_mooncake
from vllm_serving import (
    PROXY_LOG,
    Json,
    Launch,
    cores,
    free_port,
    nixl_variables,
    prepare,
    start_engine,
    start_proxy,
    stop,
    wait_until_healthy,
)

# vLLM's Mooncake connector asks for the number of an accelerator, and a CPU has none.
MOONCAKE_ON_CPU = '''"""vLLM's Mooncake connector where there is no accelerator to have a number."""
import torch
torch.accelerator.current_device_index = lambda: 0
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
class MooncakeCpuConnector(MooncakeConnector):
    pass
'''
# A worker and an EngineCore look for the next message in a busy loop for a second after each one. A
# pair has four such processes: on two cores they would measure each other's loops. vLLM's socket
# drops what comes within a millisecond of another message; only its loop makes up for that.
WITHOUT_BUSY_LOOPS = '''"""vLLM's processes wait for each other on sockets, at once."""
import zmq
from vllm.distributed.device_communicators import shm_broadcast
class SocketCondition(shm_broadcast.SpinCondition):
    def __init__(self, is_reader, context, notify_address):
        unused = "" if is_reader else ".unused"
        super().__init__(is_reader, context, notify_address + unused, busy_loop_s=0)
        if not is_reader:
            self.local_notify_socket.close()
            self.local_notify_socket = context.socket(zmq.PUB)
            self.local_notify_socket.bind(notify_address)
def register():
    shm_broadcast.SpinCondition = SocketCondition
'''
SMALL_STEPS = ("--max-num-seqs", "16")
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass
class Contender:
    """Something that serves.

    Args:
        name: what the table calls it.
        url: where requests go.
        prefill, decode: its instances; both are ``url`` where there is only one.
        processes: what it runs.
    """

    name: str
    url: str
    prefill: str
    decode: str
    processes: list[subprocess.Popen[bytes]]


@contextmanager
def running(name: str, timeout_s: float) -> Iterator[Contender]:
    """A contender that is up.

    Raises:
        Skip: it can't be run here.
    """
    with ExitStack() as stack:
        found = CONTENDERS[name](stack, timeout_s)
        found.name = name
        yield found


def one_vllm(stack: ExitStack, timeout_s: float) -> Contender:
    """One instance without a connector, on one core like each of a pair."""
    launch = _launch(None, "0", "single")
    child = _start(stack, launch)
    wait_until_healthy(launch.url, launch.log, timeout_s, [child])
    return Contender("", launch.url, launch.url, launch.url, [child])


def ours(connector: str, transport: str) -> Callable[[ExitStack, float], Contender]:
    """A pair with our connector."""
    extra: Json = {"kv_connector_extra_config": {"transport": [transport]}}
    flow = "push" if "Push" in connector else "pull"
    config = {"kv_connector": connector, "kv_load_failure_policy": "recompute"} | extra

    def begin(stack: ExitStack, timeout_s: float) -> Contender:
        return _pair(stack, timeout_s, config, {}, {}, flow)

    return begin


def nixl(stack: ExitStack, timeout_s: float) -> Contender:
    """A pair with vLLM's NIXL connector over TCP and shared memory."""
    config = {"kv_connector": "NixlConnector"}
    return _pair(stack, timeout_s, config, nixl_variables(), nixl_variables(), "pull")


def mooncake(stack: ExitStack, timeout_s: float) -> Contender:
    """A pair with vLLM's Mooncake connector over TCP."""
    install_mooncake(prepare())
    ports = free_port(), free_port()
    prefill, decode = (
        {
            "MC_TCP_BIND_ADDRESS": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        }
        for port in ports
    )
    config: Json = {
        "kv_connector": "MooncakeCpuConnector",
        "kv_connector_module_path": "vllm_mooncake_on_cpu",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    words = ("--prefill-bootstrap-port", str(ports[0]))
    return _pair(stack, timeout_s, config, prefill, decode, "pull", *words)


def one_engine(stack: ExitStack, timeout_s: float) -> Contender:
    """Our own engine, prefill and decode in one instance."""
    url, child = _engine(stack, "both", 0, timeout_s)
    return Contender("", url, url, url, [child])


def engine_pair(stack: ExitStack, timeout_s: float) -> Contender:
    """Our own engine as P and D."""
    prefill, first = _engine(stack, "prefill", 0, timeout_s)
    decode, second = _engine(stack, "decode", 1, timeout_s)
    return _proxied(stack, prefill, decode, [first, second], "pull", emits=False)


CONTENDERS: dict[str, Callable[[ExitStack, float], Contender]] = {
    "one vLLM": one_vllm,
    "mooncake tcp": mooncake,
    "nixl": nixl,
    "ours shm": ours("HalPullConnector", "shm"),
    "ours tcp": ours("HalPullConnector", "tcp"),
    "ours push": ours("HalPushConnector", "shm"),
    "one engine": one_engine,
    "engine pair": engine_pair,
}


def _launch(
    transfer: Json | None, core: str, name: str, environment: dict[str, str] | None = None
) -> Launch:
    log = CACHE / f"bench-{name}.log"
    log.unlink(missing_ok=True)
    variables = {"PYTHONPATH": str(_plugins())} | (environment or {})
    return Launch(prepare(), transfer, cores(int(core)), log, SMALL_STEPS, variables)


def _plugins() -> Path:
    """A folder with what this machine needs of vLLM, installed for whoever has it on its path."""
    folder = CACHE / "vllm-plugins"
    installed = folder / "bench_vllm_plugins-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bench-vllm-plugins\nVersion: 1\n"
    )
    (installed / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwithout_busy_loops = vllm_without_busy_loops:register\n"
    )
    (folder / "vllm_without_busy_loops.py").write_text(WITHOUT_BUSY_LOOPS)
    (folder / "vllm_mooncake_on_cpu.py").write_text(MOONCAKE_ON_CPU)
    return folder


def _start(stack: ExitStack, launch: Launch) -> subprocess.Popen[bytes]:
    child = launch.start()
    stack.callback(stop, child)
    return child


def _pair(
    stack: ExitStack,
    timeout_s: float,
    config: Json,
    prefill_environment: dict[str, str],
    decode_environment: dict[str, str],
    flow: str,
    *words: str,
) -> Contender:
    launches = [
        _launch(
            config | {"kv_role": ROLES[role], "engine_id": f"{role}-{free_port()}"},
            core,
            f"{config['kv_connector']}-{role}",
            environment,
        )
        for role, core, environment in (
            ("prefill", "0", prefill_environment),
            ("decode", "1", decode_environment),
        )
    ]
    children = [_start(stack, each) for each in launches]
    for each in launches:
        wait_until_healthy(each.url, each.log, timeout_s, children)
    urls = [each.url for each in launches]
    return _proxied(stack, urls[0], urls[1], children, flow, *words)


def _proxied(
    stack: ExitStack,
    prefill: str,
    decode: str,
    children: list[subprocess.Popen[bytes]],
    flow: str,
    *words: str,
    emits: bool = True,
) -> Contender:
    port = free_port()
    child = start_proxy(prefill, decode, port, flow, *words, emits_first_token=emits)
    stack.callback(stop, child)
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, PROXY_LOG, 60, [child])
    return Contender("", url, prefill, decode, [*children, child])


def _engine(
    stack: ExitStack, role: str, core: int, timeout_s: float
) -> tuple[str, subprocess.Popen[bytes]]:
    log = CACHE / f"bench-engine-{role}.log"
    url, child = start_engine(role, core, log)
    stack.callback(stop, child)
    wait_until_healthy(url, log, timeout_s, [child])
    return url, child
