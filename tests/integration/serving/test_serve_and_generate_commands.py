"""``mooncake-engine`` as a program: start, rejected configurations, and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.ports import free_range
from support.programs import TINY_LLAMA, Program, ranks_of, running, serving

from mooncake_engine.llm import LLM
from mooncake_engine.messages import FinishReason
from mooncake_engine.sampling_params import SamplingParams

PAGE = "Put both on one machine and they get in each other's way. A long"
MODEL = ("--model", str(TINY_LLAMA))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_until_signalled(number: signal.Signals) -> None:
    with serving() as (url, program):
        with urllib.request.urlopen(f"{url}/health") as response:
            assert response.status == 200
        assert program.end(number) == 0
    assert "loading weights: 100 %" in program.error_text
    assert "Traceback" not in program.error_text


def test_client_whose_host_is_gone_is_probed(tiny_llama_url: str) -> None:
    """It sends no end, and an answer that fits into the kernel's buffers can be written to it."""
    port = int(tiny_llama_url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        ends = [f":{end:04X}" for end in (port, client.getsockname()[1])]
        deadline = time.monotonic() + 30
        timers = [""]
        while timers != ["02"]:  # the kernel's timer of probes; at first it awaits the reply's ACK
            assert time.monotonic() < deadline, f"the connection's timer is {timers}"
            rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
            timers = [
                row[5].partition(":")[0]
                for row in rows
                if row[1].endswith(ends[0]) and row[2].endswith(ends[1])
            ]
            time.sleep(0.01)


def ask_endlessly(url: str, num_tokens: int) -> urllib.request.Request:
    body = {"prompt": PAGE, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    return urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())


def test_shutdown_completes_running_and_rejects_new_requests() -> None:
    with serving() as (url, program):
        with urllib.request.urlopen(ask_endlessly(url, 1900)) as response:
            assert response.readline().startswith(b"data: ")
            program.process.send_signal(signal.SIGTERM)
            refused = []
            while not refused:
                try:
                    urllib.request.urlopen(ask_endlessly(url, 1)).close()
                except urllib.error.HTTPError as exc:
                    with exc:
                        refused.append((exc.code, exc.headers["Retry-After"]))
            events = [line for line in response if line.startswith(b"data: ")]
        assert program.wait() == 0
    assert refused == [(503, "1")]
    assert b'"finish_reason":"length"' in events[-2]
    assert events[-1] == b"data: [DONE]\n"


def test_answers_beyond_shutdown_timeout_are_aborted_with_error() -> None:
    with serving("--shutdown-timeout", "0") as (url, program):
        with urllib.request.urlopen(ask_endlessly(url, 1900)) as response:
            assert response.readline().startswith(b"data: ")
            program.process.send_signal(signal.SIGTERM)
            events = [line for line in response if line.startswith(b"data: ")]
        assert program.wait() == 0
    assert b'"code":"shutting_down"' in events[-1]
    assert "Traceback" not in program.error_text


def test_signal_to_ranks_too_lets_answers_complete() -> None:
    with serving("--tp-size", "2") as (url, program):
        with urllib.request.urlopen(ask_endlessly(url, 200)) as response:
            assert response.readline().startswith(b"data: ")
            os.killpg(program.process.pid, signal.SIGTERM)  # as systemd does
            events = [line for line in response if line.startswith(b"data: ")]
        assert program.wait() == 0
    assert b'"finish_reason":"length"' in events[-2]
    assert events[-1] == b"data: [DONE]\n"
    assert "died" not in program.error_text


def test_dead_engine_ends_instance_with_reason() -> None:
    with serving("--tp-size", "2") as (url, program):
        with urllib.request.urlopen(ask_endlessly(url, 1900)) as response:
            assert response.readline().startswith(b"data: ")
            os.kill(ranks_of(program)[0], signal.SIGKILL)
            events = [line for line in response if line.startswith(b"data: ")]
        assert program.wait() == 1
    assert b'"code":"engine_dead"' in events[-1]
    reason = r"mooncake-engine: error: rank \d of 2 died: killed by SIGKILL, .*: see dmesg"
    assert re.fullmatch(reason, program.error_text.splitlines()[-1])


@pytest.mark.parametrize(
    "argv",
    [
        ("mooncake_engine.cli", "serve", *MODEL, "--num-kv-blocks", "64", "--threads", "1"),
        ("mooncake_proxy", "--backend-url", "http://127.0.0.1:1"),
    ],
    ids=["engine", "proxy"],
)
def test_output_on_full_disk_does_not_block_serving(argv: tuple[str, ...]) -> None:
    (port,) = free_range(1)
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv, "--port", str(port)], stdout=full, stderr=full
        )
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Raises AssertionError if the process exits first."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"it ended with {process.returncode}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_while_loading(number: signal.Signals) -> None:
    with running("mooncake_engine.cli", "serve", *MODEL, "--port", "0") as program:
        time.sleep(1.0)
        assert program.end(number) in (0, -number)
        assert program.lines == []


def one_line_error(program: Program) -> str:
    lines = program.error_text.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_taken_port_is_rejected_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running("mooncake_engine.cli", "serve", *MODEL, "--port", port) as program:
            assert program.wait() == 1
    error = one_line_error(program)
    assert error.startswith(f"mooncake-engine: error: port {port} on 127.0.0.1 is in use")


def test_taken_side_channel_port_is_rejected_before_loading() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ["--role", "decode", "--kv-port", str(taken.getsockname()[1]), "--port", "0"]
        with running("mooncake_engine.cli", "serve", *MODEL, *options) as program:
            assert program.wait() == 1
    assert "or choose another --kv-port" in one_line_error(program)


def test_two_instances_cannot_have_one_port() -> None:
    """Also while the first one is still loading and does not listen yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with running("mooncake_engine.cli", "serve", *MODEL, "--port", port) as first:
        first.wait_for("ready ")
        with running("mooncake_engine.cli", "serve", *MODEL, "--port", port) as second:
            assert second.wait() == 1


def test_restarted_instance_can_bind_its_port_at_once() -> None:
    """Otherwise connections in TIME_WAIT would block the port for a minute."""
    with serving() as (url, program):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
            program.close()
            while connection.recv(4096):
                pass
    with serving("--port", str(port)) as (again, _):
        assert again == url


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "no/such/model"), "no config.json in no/such/model"),
        ((*MODEL, "--block-size", "0"), "block_size must be at least 1, got 0"),
        ((*MODEL, "--kv-secret-file", "no/such/file", "--role", "decode"), "--kv-secret-file"),
        ((*MODEL, "--backend", "abacus"), "abacus"),
    ],
)
def test_invalid_configuration_is_one_line_error(options: tuple[str, ...], words: str) -> None:
    with running("mooncake_engine.cli", "serve", "--port", "0", *options) as program:
        assert program.wait() in (1, 2)
    assert words in one_line_error(program)


def test_address_of_another_host_is_one_line_error(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key-that-is-long-enough-to-be-safe\n")
    options = ("--host", "203.0.113.1", "--port", "0", "--api-key-file", str(keys))
    with running("mooncake_engine.cli", "serve", *MODEL, *options) as program:
        assert program.wait() == 2
    assert "can't listen on 203.0.113.1" in one_line_error(program)


def test_incomplete_checkpoint_is_one_line_error(tmp_path: Path) -> None:
    for file in TINY_LLAMA.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    # a host with little free memory would log a second line
    options = ["--model", str(tmp_path), "--port", "0", "--swap-space", "0"]
    with running("mooncake_engine.cli", "serve", *options) as program:
        assert program.wait() == 1
    assert "safetensors" in one_line_error(program)


def test_generate_prints_the_answer() -> None:
    argv = ["generate", *MODEL, PAGE, "--max-tokens", "8", "--threads", "1"]
    with running("mooncake_engine.cli", *argv) as program:
        assert program.wait(60) == 0
    assert program.lines == [" prompt \n"]


def test_offline() -> None:
    with LLM(TINY_LLAMA, num_kv_blocks=256, threads=1) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
        outputs = llm.generate([PAGE, PAGE[:-7]], [greedy, greedy])
        assert [output.outputs[0].text for output in outputs] == [" prompt ", " A long "]
        assert len(outputs[0].outputs[0].logprobs) == 8
        chat = [{"role": "user", "content": "Hello!"}]
        several = SamplingParams(temperature=0, max_tokens=None, n=2)
        answers = llm.chat(chat, several)[0].outputs
        assert {a.text for a in answers} == {"Hello! Welcome to the café of two kitchens."}
        assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}
    llm.close()
