"""Starts what ``bench_vllm.py`` measures: vLLM alone, pairs with each connector, and our engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import vllm_paced_serving as paced
from vllm_environment import CACHE, install_mooncake
from vllm_paced_plugin import ENTRY_POINT
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

# vLLM's Mooncake connector asks for the current accelerator's index, which does not exist on a CPU.
MOONCAKE_ON_CPU = '''"""vLLM's Mooncake connector on a host without accelerators."""
import torch
torch.accelerator.current_device_index = lambda: 0
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
class MooncakeCpuConnector(MooncakeConnector):
    pass
'''
# A worker and an EngineCore poll for the next message in a busy loop for a second after each one. A
# pair has four such processes, whose loops would distort measurements on two cores. vLLM's socket
# drops messages that arrive within a millisecond of another one, which only the busy loop makes up
# for; this condition does not drop them.
WITHOUT_BUSY_LOOPS = '''"""Makes vLLM's processes wait on sockets, without a busy loop."""
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
WIDE_QUEUES = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "1000000",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "1000000",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "10000",
}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass
class Contender:
    """A deployment under test.

    Args:
        name: name in the table.
        url: URL for requests.
        prefill, decode: URLs of its instances; both are ``url`` if there is only one.
        processes: its processes.
    """

    name: str
    url: str
    prefill: str
    decode: str
    processes: list[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Start:
    """Parameters for starting a contender.

    Args:
        stack: stops its processes.
        timeout_s: seconds within which each instance must be ready.
        is_paced: whether vLLM uses the simulated device.
    """

    stack: ExitStack
    timeout_s: float
    is_paced: bool


@contextmanager
def running(name: str, timeout_s: float, *, is_paced: bool) -> Iterator[Contender]:
    """Start a contender, and wait until it is ready.

    Raises:
        Skip: it can't run here.
    """
    with ExitStack() as stack:
        found = CONTENDERS[name](Start(stack, timeout_s, is_paced))
        found.name = name
        yield found


def one_vllm(start: Start) -> Contender:
    """One instance without a connector, on one core like each instance of a pair."""
    launch = _launch(start, None, "0", "single")
    child = _start(start, launch)
    wait_until_healthy(launch.url, launch.log, start.timeout_s, [child])
    return Contender("", launch.url, launch.url, launch.url, [child])


def ours(connector: str, transport: str) -> Callable[[Start], Contender]:
    """A pair with our connector."""
    extra: Json = {"kv_connector_extra_config": {"transport": [transport]}}
    flow = "push" if "Push" in connector else "pull"
    config = {"kv_connector": connector, "kv_load_failure_policy": "recompute"} | extra

    def begin(start: Start) -> Contender:
        return _pair(start, config, {}, {}, flow)

    return begin


def nixl(start: Start) -> Contender:
    """A pair with vLLM's NIXL connector over TCP and shared memory."""
    config = {"kv_connector": "NixlConnector"}
    return _pair(start, config, nixl_variables(), nixl_variables(), "pull")


def mooncake(start: Start) -> Contender:
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
    if start.is_paced:  # its engine rejects the transfers of a few large prompts, and requests fail
        config["kv_load_failure_policy"] = "recompute"
        prefill |= WIDE_QUEUES
        decode |= WIDE_QUEUES
    words = ("--prefill-bootstrap-port", str(ports[0]))
    return _pair(start, config, prefill, decode, "pull", *words)


def one_engine(start: Start) -> Contender:
    """Our own engine, prefill and decode in one instance."""
    url, child = _engine(start, "both", 0)
    return Contender("", url, url, url, [child])


def engine_pair(start: Start) -> Contender:
    """Our own engine as P and D."""
    prefill, first = _engine(start, "prefill", 0)
    decode, second = _engine(start, "decode", 1)
    return _proxied(start, prefill, decode, [first, second], "pull", emits=False)


CONTENDERS: dict[str, Callable[[Start], Contender]] = {
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
    start: Start,
    transfer: Json | None,
    core: str,
    name: str,
    environment: dict[str, str] | None = None,
) -> Launch:
    log = CACHE / f"bench-{name}.log"
    log.unlink(missing_ok=True)
    variables = {"PYTHONPATH": str(_plugins(start))} | (environment or {})
    if not start.is_paced:
        return Launch(prepare(), transfer, cores(int(core)), log, SMALL_STEPS, variables)
    variables |= paced.VARIABLES
    variables["PYTHONPATH"] += f":{paced.FOLDER}"
    words = (*paced.OF_MODEL, *paced.WORKER, *SMALL_STEPS)
    model = paced.prepare_model()
    return Launch(prepare(), transfer, paced.UNBOUND, log, words, variables, model=model)


def _plugins(start: Start) -> Path:
    """A folder of plugins that vLLM needs on this machine; active for processes with it on their
    path."""
    folder = CACHE / ("vllm-paced-plugins" if start.is_paced else "vllm-plugins")
    installed = folder / "bench_vllm_plugins-1.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bench-vllm-plugins\nVersion: 1\n"
    )
    plugins = ["without_busy_loops = vllm_without_busy_loops:register"]
    plugins += [ENTRY_POINT] if start.is_paced else []
    (installed / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *plugins, ""]))
    (folder / "vllm_without_busy_loops.py").write_text(WITHOUT_BUSY_LOOPS)
    (folder / "vllm_mooncake_on_cpu.py").write_text(MOONCAKE_ON_CPU)
    return folder


def _start(start: Start, launch: Launch) -> subprocess.Popen[bytes]:
    child = launch.start()
    start.stack.callback(stop, child)
    return child


def _pair(
    start: Start,
    config: Json,
    prefill_environment: dict[str, str],
    decode_environment: dict[str, str],
    flow: str,
    *words: str,
) -> Contender:
    launches = [
        _launch(
            start,
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
    children = [_start(start, each) for each in launches]
    for each in launches:
        wait_until_healthy(each.url, each.log, start.timeout_s, children)
    urls = [each.url for each in launches]
    return _proxied(start, urls[0], urls[1], children, flow, *words)


def _proxied(
    start: Start,
    prefill: str,
    decode: str,
    children: list[subprocess.Popen[bytes]],
    flow: str,
    *words: str,
    emits: bool = True,
) -> Contender:
    port = free_port()
    child = start_proxy(prefill, decode, port, flow, *words, emits_first_token=emits)
    start.stack.callback(stop, child)
    url = f"http://127.0.0.1:{port}"
    wait_until_healthy(url, PROXY_LOG, 60, [child])
    return Contender("", url, prefill, decode, [*children, child])


def _engine(start: Start, role: str, core: int) -> tuple[str, subprocess.Popen[bytes]]:
    log = CACHE / f"bench-engine-{role}.log"
    url, child = start_engine(role, core, log)
    start.stack.callback(stop, child)
    wait_until_healthy(url, log, start.timeout_s, [child])
    return url, child
