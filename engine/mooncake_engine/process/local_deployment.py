"""``mooncake-engine up``: starts prefill instances, decode instances and a proxy with one command.

The children are separate programs, as on a cluster. Each prints its URL when it is ready to accept
requests.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from mooncake_engine.errors import ConfigError, EngineError
from mooncake_engine.kv_connector import find_connector
from mooncake_engine.process.child_processes import Child, ChildProcesses, StopSignals
from mooncake_engine.server.api_server import bind
from mooncake_engine.server.server_options import ServerOptions
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.pool.pool_config import KVPoolConfig

_SHUTDOWN_MARGIN_S = 25.0
"""Seconds that a child has to shut down, in addition to the time for running requests. More than an
instance gives its core to end its ranks."""
_HEALTHY_TIMEOUT_S = 60.0
"""Seconds that the proxy has to become healthy."""
_REQUEST_TIMEOUT_S = 600.0
"""Timeout of one HTTP request to the proxy, in seconds."""
_POLL_S = 0.1
"""Seconds between two health checks."""
_MAX_TOKENS = 128
"""Maximum length of the output for the prompt that is sent at the end."""


class LaunchFailed(EngineError):
    """All processes are running, but the deployment does not respond."""


class _NeedsKey(LaunchFailed):
    """The proxy answers only who has one of its keys."""


@dataclass(frozen=True, slots=True)
class LocalDeployment:
    """A deployment to start.

    Args:
        host, port: address of the proxy; port 0 takes a free one.
        num_prefill, num_decode: numbers of instances.
        engine_argv: options of ``mooncake-engine serve`` for every instance.
        prefill_argv, decode_argv: further options for the instances of one role.
        kv_pool: KVCache pool of all instances, which share one node store; None for no pool.
        transports: names of the transports for KV, in order of preference.
        connector: name of the KV connector, which also determines the proxy's flow.
        log_dir: directory for log files; None for standard error.
        prompt: prompt to send once everything is running.
        otlp_endpoint: OTLP endpoint of the proxy's traces; that of the instances is in
            ``engine_argv``.
        shutdown_timeout_s: seconds that the proxy's running requests may take to finish after a
            stop.
        max_restarts: maximum number of consecutive restarts of a process that dies, while the
            others keep running; 0 stops the deployment when one dies. The pool's store is always
            restarted.
        log_format: log format of the processes; that of the instances is in ``engine_argv``.
        slo_ttft_ms, slo_tbt_ms: objectives for the proxy's metrics and its page, in milliseconds;
            those of the instances are in ``engine_argv``.
        proxy_argv: further options of the proxy.
        device_argv: device options of each instance, prefill instances first; empty if devices are
            not divided.
    """

    host: str
    port: int
    num_prefill: int
    num_decode: int
    engine_argv: tuple[str, ...]
    transports: tuple[str, ...] = ()
    connector: str = KVTransferConfig().connector
    log_dir: Path | None = None
    prompt: str = "What is prefill?"
    otlp_endpoint: str | None = None
    shutdown_timeout_s: float = ServerOptions().shutdown_timeout_s
    max_restarts: int = 0
    prefill_argv: tuple[str, ...] = ()
    decode_argv: tuple[str, ...] = ()
    kv_pool: KVPoolConfig | None = None
    log_format: str = "text"
    slo_ttft_ms: float | None = None
    slo_tbt_ms: float | None = None
    proxy_argv: tuple[str, ...] = ()
    device_argv: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
            if count < 1:
                raise ConfigError(f"--{name} must be at least 1, got {count}")
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts must not be negative, got {self.max_restarts}")
        find_connector(self.connector)

    @property
    def shares_devices(self) -> bool:
        """Whether several instances share a device."""
        firsts = [argv[:2] for argv in self.device_argv if argv]
        return len(set(firsts)) < len(firsts)


def up(deployment: LocalDeployment) -> None:
    """Run a deployment until SIGINT or SIGTERM. Running requests may finish first, unless a second
    signal arrives. No process is left running, however the deployment ends.

    Raises:
        PortInUse, ConfigError: the deployment can't be set up as configured; nothing was started.
        ChildDied, LaunchFailed: the deployment did not start, or a process died.
    """
    with bind(deployment.host, deployment.port):
        pass  # fail now if the port is taken, not after the models are loaded
    with suppress(asyncio.CancelledError):  # raised after a signal
        asyncio.run(_up(deployment))


async def _up(deployment: LocalDeployment) -> None:
    stop_timeout_s = deployment.shutdown_timeout_s + _SHUTDOWN_MARGIN_S
    children = ChildProcesses(
        deployment.log_dir,
        stop_timeout_s,
        deployment.max_restarts,
        has_json_lines=deployment.log_format == "json",
    )
    _stop_on_signal(children)
    with tempfile.TemporaryDirectory(prefix="mooncake-") as directory:
        secret_file = _write_secret(Path(directory))
        async with children:
            await children.guard(_serve(deployment, children, secret_file))


async def _serve(deployment: LocalDeployment, children: ChildProcesses, secret_file: Path) -> None:
    """Start all processes, send the prompt, and wait until cancelled."""
    pools: dict[str, list[Child]] = {"prefill": [], "decode": []}
    pool = await _start_store(deployment, children, secret_file)
    device_argv = iter(deployment.device_argv)
    for role, count in (("prefill", deployment.num_prefill), ("decode", deployment.num_decode)):
        for index in range(count):
            argv = _instance_argv(deployment, role, secret_file, pool.instance_argv)
            child = await children.start(f"{role}-{index}", [*argv, *next(device_argv, ())])
            pools[role].append(child)
            if deployment.shares_devices:
                await child.ready  # no other may allocate while it measures the free memory
    urls = {role: [await child.ready for child in pool] for role, pool in pools.items()}
    proxy = await children.start("proxy", [*_proxy_argv(deployment, urls), *pool.proxy_argv])
    await _send_prompt(await proxy.ready, deployment.prompt)
    if pool.store is not None:
        options = f"--port {pool.store.port} --kv-secret-file {shlex.quote(str(secret_file))}"
        print(f"\nthe pool: mooncake-kv stats {options}", flush=True)  # noqa: T201  # as curl
    await asyncio.Event().wait()


def _stop_on_signal(children: ChildProcesses) -> None:
    """Have the first SIGINT or SIGTERM cancel the current task, and a later one, or one after a
    child has died, stop the children without waiting for running requests."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals = StopSignals()

    def stop() -> None:
        is_first = signals.note(loop.time())
        if is_first and not children.is_stopping:
            task.cancel()
        elif is_first or signals.is_forced:
            children.force_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)


def _write_secret(directory: Path) -> Path:
    """Creates the file with the secret by which the instances authenticate each other."""
    path = directory / "kv-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _instance_argv(
    deployment: LocalDeployment, role: str, secret_file: Path, pool_argv: Sequence[str]
) -> list[str]:
    argv = [sys.executable, "-m", "mooncake_engine.cli", "serve", "--role", role, "--port", "0"]
    argv += ["--kv-secret-file", str(secret_file), *deployment.engine_argv]
    argv += ["--kv-connector", deployment.connector]
    for name in deployment.transports:
        argv += ["--transport", name]
    argv += pool_argv
    return [*argv, *(deployment.prefill_argv if role == "prefill" else deployment.decode_argv)]


@dataclass(frozen=True, slots=True)
class _PoolOptions:
    """The options of instances that connect them to the pool, those of the proxy by which
    Prometheus finds the pool's store, and the address of the store that was started."""

    instance_argv: Sequence[str] = ()
    proxy_argv: Sequence[str] = ()
    store: SplitResult | None = None


async def _start_store(
    deployment: LocalDeployment, children: ChildProcesses, secret_file: Path
) -> _PoolOptions:
    """Start one node store for all instances, if they are to have one.

    Prefill instances load the chunks that decode instances save, so a separate store in each
    instance would be useless. The instances can serve requests without the store; if it dies, it is
    restarted.
    """
    pool = deployment.kv_pool
    if pool is None:
        return _PoolOptions()
    rest = [f"chunk={pool.chunk_tokens}", f"load={'always' if pool.always_loads else 'faster'}"]
    if pool.mooncake_store:
        options = [f"mooncake-store={pool.mooncake_store}", f"staging={pool.staging_bytes}"]
        options += [f"protocol={pool.protocol}"]
        options += [f"dram={pool.dram_bytes}"] if pool.dram_bytes else []
        return _PoolOptions(["--kv-pool", ",".join([*options, *rest])])
    rest += [f"source-allow={host}" for host in pool.source_allow]
    connect = [f"connect={host}:{port}" for host, port in pool.connect]
    proxy_argv: list[str] = []
    address = None
    if pool.dram_bytes:
        argv = [sys.executable, "-m", "mooncake_kv", "store", "--dram", str(pool.dram_bytes)]
        argv += ["--port", str(pool.port or 0), "--kv-secret-file", str(secret_file)]
        argv += ["--log-format", deployment.log_format]
        metrics_port = _free_port()  # the same after a restart
        proxy_argv = ["--store-metrics", f"http://127.0.0.1:{metrics_port}"]
        argv += ["--metrics-port", str(metrics_port), "--eviction", pool.policy]
        for tenant, nbytes in pool.quotas:
            argv += ["--tenant-quota", f"{tenant}={nbytes}"]
        for directory, nbytes in pool.ssd:
            argv += ["--ssd", f"{directory}:{nbytes}"]
        argv += ["--ssd-write-bytes-per-day", str(pool.ssd_write_bytes_per_day)]
        argv += ["--ssd-min-free-bytes", str(pool.ssd_min_free_bytes)]
        store = await children.start("kv-store", argv, is_needed=False)
        address = urlsplit(await store.ready)
        connect.insert(0, f"connect={address.netloc}")
    return _PoolOptions(["--kv-pool", ",".join([*connect, *rest])], proxy_argv, address)


def _free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def _proxy_argv(deployment: LocalDeployment, urls: dict[str, list[str]]) -> list[str]:
    argv = [sys.executable, "-m", "mooncake_proxy", "--host", deployment.host]
    argv += [
        "--port",
        str(deployment.port),
        "--shutdown-timeout",
        str(deployment.shutdown_timeout_s),
    ]
    argv += ["--flow", find_connector(deployment.connector).mode.value]
    argv += ["--log-format", deployment.log_format, *deployment.proxy_argv]
    if deployment.otlp_endpoint is not None:
        argv += ["--otlp-endpoint", deployment.otlp_endpoint]
    for name, limit in (("ttft", deployment.slo_ttft_ms), ("tbt", deployment.slo_tbt_ms)):
        if limit is not None:
            argv += [f"--slo-{name}", f"{limit:g}"]
    for role, instances in urls.items():
        for url in instances:
            argv += [f"--{role}", url]
    return argv


async def _send_prompt(url: str, prompt: str) -> None:
    """Send the prompt; print an equivalent curl command and the response. A proxy with keys is sent
    nothing.

    Raises:
        LaunchFailed: the proxy does not become healthy, or does not respond.
    """
    await _until_healthy(url)
    try:
        model = (await _call(f"{url}/v1/models"))["data"][0]["id"]
    except _NeedsKey:
        print(f"\ncurl {url}/v1/models -H 'Authorization: Bearer KEY'\n", flush=True)  # noqa: T201
        return
    common = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0}
    path = "/v1/chat/completions"
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], **common}
    try:
        response = await _call(url + path, body)
    except LaunchFailed:  # a model without a chat template can only complete text
        path, body = "/v1/completions", {"prompt": prompt, **common}
        response = await _call(url + path, body)
    choice = response["choices"][0]
    streamed = shlex.quote(json.dumps(body | {"stream": True}, ensure_ascii=False))
    curl = f"curl -N {url}{path} -H 'Content-Type: application/json' -d {streamed}"
    print(f"\n{curl}\n")  # noqa: T201  # what the user came for
    print(_text_of(choice), flush=True)  # noqa: T201


def _text_of(choice: dict[str, Any]) -> str:
    """The text of an answer; of one that ended while the model was reasoning, the reasoning."""
    message = choice.get("message", {})
    found = choice.get("text") or message.get("content") or message.get("reasoning")
    return str(found or "")


async def _until_healthy(url: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _HEALTHY_TIMEOUT_S
    while True:
        try:
            await _call(f"{url}/health")
        except LaunchFailed as exc:
            if loop.time() > deadline:
                raise LaunchFailed(f"not healthy within {_HEALTHY_TIMEOUT_S:.0f} s: {exc}") from exc
        else:
            return
        await asyncio.sleep(_POLL_S)


async def _call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return await asyncio.to_thread(_fetch, url, body)


def _fetch(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the JSON response to a GET, or to a POST if there is a body.

    Raises:
        LaunchFailed: the server can't be reached or responds with an error; includes its message.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignore http_proxy
    try:
        with opener.open(request, timeout=_REQUEST_TIMEOUT_S) as response:
            decoded: dict[str, Any] = json.loads(response.read() or b"{}")
    except urllib.error.HTTPError as exc:
        with exc:
            message = exc.read().decode(errors="replace")
        kind = _NeedsKey if exc.code == 401 else LaunchFailed
        raise kind(f"{url} responds with {exc.code}: {message}") from exc
    except (OSError, ValueError) as exc:
        raise LaunchFailed(f"{url} does not respond: {exc}") from exc
    return decoded
