"""The proxy as a process: start, output, signals, workers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
from support.proxy_fakes import Behaviour, FakeInstance, text_of
from support.proxy_fakes_client import BODY, make_certificate

ROOT = Path(__file__).resolve().parents[3]


@asynccontextmanager
async def proxy(
    *flags: str, stderr: int | None = None
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A proxy process and its URL; stopped with SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "mooncake_proxy",
        "--port",
        "0",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
        yield line.split()[-1], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[FakeInstance, FakeInstance]]:
    """One P and one D."""
    both = FakeInstance("p0"), FakeInstance("d0")
    for fake in both:
        await fake.start()
    both[0].peers = {"d0": both[1]}
    try:
        yield both
    finally:
        for fake in both:
            await fake.kill()


def test_proxy_starts_and_exits_on_sigterm() -> None:
    async def main() -> None:
        async with (
            pair() as (p, d),
            proxy("--prefill", p.url, "--decode", d.url) as (url, _),
            httpx.AsyncClient(base_url=url) as client,
        ):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == text_of(5)

    asyncio.run(main())


def test_running_stream_completes_before_exit() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            d.behaviour.token_delay_s = 0.05
            async with proxy("--prefill", p.url, "--decode", d.url) as (url, process):
                client = httpx.AsyncClient(base_url=url)
                async with client:
                    asked = asyncio.ensure_future(
                        client.post("/v1/completions", json=BODY | {"stream": True})
                    )
                    await d.wait_for(lambda: bool(d.generated))
                    process.send_signal(signal.SIGTERM)
                    assert (await asked).text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_streams_and_instances_survive_a_stop_of_the_proxy() -> None:
    """What instances have sent meanwhile is read before their silence is judged."""

    async def main() -> None:
        async with pair() as (p, d):
            d.behaviour.token_delay_s = 0.05
            flags = ("--prefill", p.url, "--decode", d.url, "--stall-timeout", "2")
            async with proxy(*flags) as (url, process), httpx.AsyncClient(base_url=url) as client:
                body = BODY | {"stream": True, "max_tokens": 100}
                asked = [client.post("/v1/completions", json=body) for _ in range(4)]
                running = asyncio.gather(*asked)
                await d.wait_for(lambda: len(d.generated) == 4)
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(3.5)
                process.send_signal(signal.SIGCONT)
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
                assert all(each.text.endswith("data: [DONE]\n\n") for each in await running)

    asyncio.run(main())


def test_sigterm_to_whole_process_group_lets_streams_complete() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            d.behaviour.token_delay_s = 0.05
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags) as (url, process):
                await _ready(url)
                async with httpx.AsyncClient(base_url=url) as client:
                    asked = asyncio.ensure_future(
                        client.post("/v1/completions", json=BODY | {"stream": True})
                    )
                    await d.wait_for(lambda: bool(d.generated))
                    for pid in (process.pid, *_children(process.pid)):  # as systemd does
                        with suppress(ProcessLookupError):  # the idle worker may have exited
                            os.kill(pid, signal.SIGTERM)
                    assert (await asked).text.endswith("data: [DONE]\n\n")

    asyncio.run(main())


def test_workers_share_one_view(tmp_path: object) -> None:
    async def main() -> None:
        async with pair() as (p, d):
            keys = f"{tmp_path}/keys"
            with open(keys, "w") as file:  # noqa: ASYNC230  # a line, in a test
                file.write("secret\n")
            flags = ("--workers", "2", "--flow", "push", "--admin-key-file", keys)
            async with proxy(*flags, "--prefill", p.url) as (url, _):
                await _ready(url)
                body = {"operation": "add", "url": d.url, "role": "decode"}
                headers = {"authorization": "Bearer secret"}
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.post("/instances", json=body, headers=headers)).is_success
                for _ in range(12):  # one connection per request, so that both workers get some
                    async with httpx.AsyncClient(base_url=url) as client:
                        answer = await client.post("/v1/completions", json=BODY)
                        assert answer.status_code == 200, answer.text
                line = 'mooncake_proxy_requests_total{endpoint="/v1/completions",status="200"} 12'
                await _metrics_say(url, line)

    asyncio.run(main())


def test_running_and_waiting_count_all_workers() -> None:
    async def main() -> None:
        slow = FakeInstance(behaviour=Behaviour(delay_s=600.0))
        await slow.start()
        flags = ("--workers", "2", "--max-running", "2", "--backend-url", slow.url)
        async with proxy(*flags, "--shutdown-timeout", "0") as (url, _):
            await _ready(url)
            async with httpx.AsyncClient(base_url=url, timeout=None) as client:
                asked = [
                    asyncio.ensure_future(client.post("/v1/completions", json=BODY))
                    for _ in range(12)
                ]
                for _ in range(8):  # one connection per request, so that both workers answer some
                    await _all_are_counted(url, len(asked))
                for request in asked:
                    request.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
        await slow.kill()

    asyncio.run(main())


async def _all_are_counted(url: str, count: int) -> None:
    samples: dict[str, str] = {}
    for _ in range(100):
        async with httpx.AsyncClient(base_url=url) as client:
            text = (await client.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines())
        places = [int(samples[f"mooncake_proxy_{name}"]) for name in ("running", "waiting")]
        if sum(places) == count and min(places) > 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(samples)


async def _ready(url: str) -> None:
    """Wait until both workers listen."""
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/health")).is_success
    await asyncio.sleep(0.3)


async def _metrics_say(url: str, line: str) -> None:
    """Every worker's /metrics shows the sum as soon as the workers have exchanged counts."""
    samples = []
    for _ in range(100):
        async with httpx.AsyncClient(base_url=url) as client:
            samples = (await client.get("/metrics")).text.splitlines()
        if line in samples:
            return
        await asyncio.sleep(0.1)
    raise AssertionError([text for text in samples if "requests_total" in text])


def test_dead_worker_is_replaced() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags, stderr=asyncio.subprocess.PIPE) as (url, process):
                await _ready(url)
                children = _children(process.pid)
                assert len(children) == 2
                os.kill(children[0], signal.SIGKILL)
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    now = _children(process.pid)
                    if len(now) == 2 and children[0] not in now:
                        break
                else:
                    raise AssertionError(f"no new worker: {children} -> {_children(process.pid)}")
                async with httpx.AsyncClient(base_url=url) as client:
                    assert (await client.post("/v1/completions", json=BODY)).is_success
            assert process.stderr is not None
            assert b"worker 0 died, killed by SIGKILL, as the" in await process.stderr.read()

    asyncio.run(main())


def test_sigterm_during_worker_restart_stops_all_workers() -> None:
    async def main() -> None:
        async with pair() as (p, d):
            flags = ("--workers", "2", "--prefill", p.url, "--decode", d.url)
            async with proxy(*flags) as (url, process):
                await _ready(url)
                for pid in _children(process.pid):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(1000):  # until the parent has noticed the death of one
                    if len(_children(process.pid)) < 2:
                        break
                    await asyncio.sleep(0.01)

    asyncio.run(main())


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def test_bad_flags_are_explained() -> None:
    async def main() -> None:
        for flags, message in (
            (["--prefill", "ftp://x"], "wanted http://HOST:PORT"),
            (["--decode", "x"], "'x': neither scheme nor port; wanted http://HOST:PORT"),
            ([], "no instance to decode, now or later: give --prefill URL and --decode URL"),
            (
                ["--prefill", "x:1"],
                "or --admin-key-file or --register-secret-file to add them over HTTP",
            ),
            (["--api-key-file", "/nonexistent"], "key file /nonexistent"),
            (["--prefill", "x:1", "--decode", "x:1"], "given twice"),
            (["--flow", "push", "--host", "0.0.0.0"], "--advertise-url"),
        ):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "mooncake_proxy", *flags, stderr=asyncio.subprocess.PIPE
            )
            _, stderr = await asyncio.wait_for(process.communicate(), 10)
            assert process.returncode == 2
            assert message in stderr.decode()
            assert stderr.count(b"\n") == 1, "one line"

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["full", "blocked"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_blocked_or_full_stderr_does_not_block_proxy(kind: str, workers: str) -> None:
    """Standard error on a full disk, and on a pipe that nothing reads."""

    async def main() -> None:
        reader, writer = (
            os.pipe() if kind == "blocked" else (None, os.open("/dev/full", os.O_WRONLY))
        )
        flags = ("--backend-url", "http://127.0.0.1:1", "--health-interval", "0")
        flags += ("--access-log", "all", "--workers", workers, "--eject-after", "0")
        try:
            async with (
                proxy(*flags, stderr=writer) as (url, _),
                httpx.AsyncClient(base_url=url, timeout=5.0) as client,
            ):
                for _ in range(400):
                    answer = await client.post("/v1/completions", json=BODY)
                    assert answer.status_code == 502
                assert (await client.get("/health")).status_code == 200
        finally:
            for fd in (reader, writer):
                if fd is not None:
                    os.close(fd)

    asyncio.run(main())


def _listening_ports(pid: int) -> set[int]:
    """TCP ports that a process and its children listen on, over IPv4."""
    inodes: set[str] = set()
    for member in (pid, *_children(pid)):
        for name in os.listdir(f"/proc/{member}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(f"/proc/{member}/fd/{name}").removeprefix("socket:["))
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"{row[9]}]" in inodes
    }


def test_workers_of_the_pull_flow_share_one_port() -> None:
    """Except for the metaservers of early pulls: one per worker, if instances support early
    pulls."""

    async def main() -> None:
        options = ("--workers", "2", "--backend-url", "http://127.0.0.1:1")
        async with proxy(*options) as (url, process):
            await _ready(url)
            await asyncio.sleep(1.0)  # several health-check sweeps
            assert _listening_ports(process.pid) == {int(url.rpartition(":")[2])}

    asyncio.run(main())


def test_worker_port_serves_metaserver_only() -> None:
    async def main() -> None:
        flags = ("--workers", "2", "--flow", "push", "--backend-url", "http://127.0.0.1:1")
        async with proxy(*flags) as (url, process):
            await _ready(url)
            own = _listening_ports(process.pid) - {int(url.rpartition(":")[2])}
            assert len(own) == 2
            async with httpx.AsyncClient() as client:
                for port in own:
                    base = f"http://127.0.0.1:{port}"
                    for path in ("/", "/health", "/metrics", "/v1/models"):
                        assert (await client.get(f"{base}{path}")).status_code == 404
                    posted = await client.post(f"{base}/v1/metaserver/guess", json={})
                    assert "no such attempt" in posted.text

    asyncio.run(main())


def test_worker_port_uses_tls(tmp_path: Path) -> None:
    async def main() -> None:
        certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        make_certificate(certificate, key)
        trust = ssl.create_default_context(cafile=str(certificate))
        flags = ("--workers", "2", "--flow", "push", "--backend-url", "http://127.0.0.1:1")
        flags += ("--tls-cert", str(certificate), "--tls-key", str(key))
        async with proxy(*flags) as (url, process):
            await asyncio.sleep(0.5)
            own = _listening_ports(process.pid) - {int(url.rpartition(":")[2])}
            assert len(own) == 2
            async with httpx.AsyncClient(verify=trust) as client:
                for port in own:
                    posted = await client.post(f"https://127.0.0.1:{port}/v1/metaserver/x", json={})
                    assert posted.status_code == 404

    asyncio.run(main())


def test_restarted_worker_gets_current_pool(tmp_path: Path) -> None:
    async def main() -> None:
        keys = tmp_path / "keys"
        keys.write_text("secret\n")
        async with pair() as (p, d):
            flags = ("--workers", "2", "--admin-key-file", str(keys))
            async with proxy(*flags, "--prefill", p.url, stderr=asyncio.subprocess.DEVNULL) as (
                url,
                process,
            ):
                await _ready(url)
                headers = {"authorization": "Bearer secret"}
                for body in (
                    {"operation": "add", "url": d.url, "role": "decode"},
                    {"operation": "drain", "url": p.url},
                ):
                    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                        assert (await client.post("/instances", json=body)).is_success
                await asyncio.sleep(0.2)
                before = _children(process.pid)
                for pid in before:  # one after the other: the parent process keeps the state
                    os.kill(pid, signal.SIGKILL)
                while len(now := _children(process.pid)) < 2 or set(now) & set(before):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                await _listening(url)
                for _ in range(8):  # one connection per request, so that both workers answer some
                    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                        found = (await client.get("/instances")).json()["instances"]
                    states = {one["name"]: one["state"] for one in found}
                    assert states == {p.url: "draining", d.url: "up"}

    asyncio.run(main())


async def _listening(url: str) -> None:
    """Wait until the started workers listen."""
    for _ in range(100):
        try:
            await _ready(url)
        except httpx.TransportError:
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("no worker listens")


def test_workers_end_when_their_parent_is_killed() -> None:
    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mooncake_proxy", "--port", "0", "--workers", "2"),
            *("--backend-url", "http://127.0.0.1:1"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        await process.stdout.readline()
        workers = _children(process.pid)
        assert len(workers) == 2
        process.kill()
        await process.wait()
        while any(os.path.exists(f"/proc/{pid}/exe") for pid in workers):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.parametrize("workers", ["1", "2"])
def test_taken_port_and_bad_flag_have_different_exit_codes(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # a name that is looked up when the instance is checked
        command = [sys.executable, "-m", "mooncake_proxy", "--backend-url", "http://no.invalid:1"]
        command += ["--port", port, "--workers", workers]
        done = subprocess.run(command, capture_output=True, timeout=20)
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}".encode() in done.stderr
    assert b"never retrieved" not in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flag", ["--upstream-ca", "--tls-cert", "--pool-file", "--admin-port"])
def test_fatal_worker_config_error_exits_proxy_without_restarts(
    flag: str, workers: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        value = port if flag == "--admin-port" else str(tmp_path / "absent")
        command = [sys.executable, "-m", "mooncake_proxy", "--backend-url", "http://127.0.0.1:1"]
        command += ["--port", "0", "--workers", workers, flag, value]
        done = subprocess.run(command, capture_output=True, timeout=20)
    assert done.returncode == (1 if flag == "--admin-port" else 2)
    named = f"can't listen on 127.0.0.1:{port}" if flag == "--admin-port" else value
    assert named.encode() in done.stderr
    assert b"starting a new one" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_workers_share_quarantined_requests() -> None:
    async def main() -> None:
        drops = FakeInstance(behaviour=Behaviour(drops=True))
        await drops.start()
        async with proxy("--workers", "2", "--backend-url", drops.url, "--eject-after", "0") as (
            url,
            _,
        ):
            await _ready(url)
            statuses = []
            for _ in range(10):  # one connection per request, so that both workers answer some
                async with httpx.AsyncClient(base_url=url) as client:
                    statuses.append((await client.post("/v1/completions", json=BODY)).status_code)
                await asyncio.sleep(0.05)
            assert statuses == [502] * 2 + [422] * 8
        await drops.kill()

    asyncio.run(main())


async def _served_certificates(url: str) -> set[str]:
    """What several connections get: one each, so that all workers answer some."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    return {await asyncio.to_thread(ssl.get_server_certificate, address) for _ in range(10)}


async def _statuses(url: str, key: str) -> set[int]:
    found = set()
    for _ in range(10):
        async with httpx.AsyncClient(base_url=url, verify=False) as client:
            headers = {"authorization": f"Bearer {key}"}
            found.add(
                (await client.post("/v1/completions", json=BODY, headers=headers)).status_code
            )
    return found


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sighup_reloads_keys_and_certificate(workers: str, tmp_path: Path) -> None:
    certificate, key, keys = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "keys"

    async def main() -> None:
        async with pair() as (p, d):
            flags = ["--prefill", p.url, "--decode", d.url, "--workers", workers]
            flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
            flags += ["--api-key-file", str(keys)]
            async with proxy(*flags, stderr=asyncio.subprocess.PIPE) as (url, process):
                assert process.stderr is not None
                await asyncio.sleep(0.5)  # until the other worker serves
                old = certificate.read_text()
                assert await _served_certificates(url) == {old}
                make_certificate(certificate, key)
                keys.write_text("a-new-key-of-clients\n")
                process.send_signal(signal.SIGHUP)
                while await _served_certificates(url) != {certificate.read_text()}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert await _statuses(url, "a-new-key-of-clients") == {200}
                assert await _statuses(url, "the-first-key-of-clients") == {401}

                new = certificate.read_text()
                certificate.write_text(old)  # does not fit the key
                keys.write_text("")
                process.send_signal(signal.SIGHUP)
                said = b""
                while b"key values mismatch" not in said or b"holds no key" not in said:
                    said += await asyncio.wait_for(process.stderr.readline(), 10)
                assert await _served_certificates(url) == {new}
                assert await _statuses(url, "a-new-key-of-clients") == {200}
                assert process.returncode is None

    make_certificate(certificate, key)
    keys.write_text("the-first-key-of-clients\n")
    asyncio.run(main())


def test_restarted_worker_has_the_current_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    async def main() -> None:
        flags = ("--workers", "2", "--backend-url", "http://127.0.0.1:1")
        options = (*flags, "--admin-key-file", str(keys))
        async with proxy(*options, stderr=asyncio.subprocess.DEVNULL) as (url, process):
            await _ready(url)
            keys.write_text("a-new-key-of-admins\n")
            process.send_signal(signal.SIGHUP)
            async with httpx.AsyncClient(base_url=url) as client:  # the parent reads them first
                asked = {"authorization": "Bearer a-new-key-of-admins"}
                while (await client.get("/instances", headers=asked)).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            before = _children(process.pid)
            for pid in before:
                os.kill(pid, signal.SIGKILL)
            while len(now := _children(process.pid)) < 2 or set(now) & set(before):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await _listening(url)
            for key, status in (("a-new-key-of-admins", 200), ("the-first-of-admins", 401)):
                headers = {"authorization": f"Bearer {key}"}
                for _ in range(8):  # one connection each, so that both workers answer some
                    async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                        assert (await client.get("/instances")).status_code == status

    keys.write_text("the-first-of-admins\n")
    asyncio.run(main())


def test_the_units_filter_of_system_calls_leaves_what_the_conductor_imports() -> None:
    unit = (ROOT / "deploy" / "systemd" / "mooncake-proxy.service").read_text()
    assert "\nSystemCallFilter=~@privileged @resources\n" in unit
    error = errno.EPERM if "\nSystemCallErrorNumber=EPERM\n" in unit else 0
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "system_call_filter.py"),
        str(error),
    ]
    command += ["-m", "mooncake_proxy", "--port", "0", "--policy", "cost"]
    command += ["--backend-url", "http://127.0.0.1:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0
    assert b"listens on" in line
