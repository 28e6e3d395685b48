"""``mooncake-hal doctor``: invalid arguments, and plans for hardware that is not present."""

from __future__ import annotations

import base64
import socket
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_hal import cli, doctor
from mooncake_hal.known_hardware import ASCEND
from mooncake_hal.registry import Registry
from mooncake_hal.session import addressing
from mooncake_hal.transport import EndpointOptions
from mooncake_hal.transports.tcp.tcp_transport import load as load_tcp


def test_no_arguments_fails_and_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("FAIL  arguments")
    for flag in ("--instance", "--file", "--transport", "--peer"):
        assert flag in output


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("nonsense",), "unrecognized arguments: nonsense"),
        (("--instance", "prefill"), "--instance: wanted KEY=VALUE,... such as role=prefill"),
    ],
)
def test_invalid_command_line_exits_with_2(
    arguments: tuple[str, ...], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    assert ended.value.code == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--file", "--secret-file"])
def test_missing_file_is_named(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", option, str(tmp_path / "missing")]) == 1
    output = capsys.readouterr().err
    assert output.startswith(f"mooncake-hal: can't read {option}: ")
    assert "missing" in output


@pytest.mark.parametrize(
    ("content", "wanted"),
    [("\n", "is empty; put the deployment's secret there"), ("abc", "3 bytes")],
)
def test_file_without_a_secret_is_rejected(
    content: str, wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text(content)
    arguments = ("--secret-file", str(tmp_path / "secret"), "--transport", "shm")
    assert cli.main(["doctor", *arguments]) == 1
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "instances: []", "[]", '{"instances": ["prefill"]}'])
def test_invalid_plan_file_is_rejected_with_an_example(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan").write_text(content)
    assert cli.main(["doctor", "--file", str(tmp_path / "plan")]) == 1
    assert 'wanted JSON such as {"instances": [{"role": "prefill"}]}' in capsys.readouterr().err


@pytest.mark.parametrize("key", ["tp", "pp", "block_size", "http", "kv"])
def test_invalid_number_is_reported(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--instance", f"backend=cpu,{key}=many"]) == 1
    assert "wanted a number, got 'many'" in capsys.readouterr().out


def test_deployment_without_a_secret_is_probed_from_another_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addressing, "is_loopback", lambda _: False)
    with closing(load_tcp().open(EndpointOptions(allow_no_secret=True))) as far:
        ranks = [{"endpoints": {"tcp": base64.b64encode(far.address).decode()}}]
        [tried] = doctor._try_ranks(Registry.discover(), ranks, "127.0.0.1", b"")
    assert tried == doctor.Check("rank 0 over tcp")


def plan(capsys: pytest.CaptureFixture[str], *instances: str) -> tuple[int, str]:
    arguments = [word for each in instances for word in ("--instance", each)]
    status = cli.main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_plan_of_absent_hardware_is_checked_by_known_constraints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, output = plan(
        capsys,
        "role=prefill,name=p,backend=cuda,generation=sm_90,tp=4",
        "role=decode,name=d,backend=ascend,tp=3",
        "role=decode,name=c,backend=cpu",
    )
    assert status == 0, output
    assert "cuda is not on this machine" in output
    assert "A2 is assumed, as no generation was given" in output
    assert "ok    deployment of p (prefill), d (decode), c (decode)" in output
    assert "ok    p to d: KV goes over staged\n" in output


def test_plan_over_two_hosts_does_not_use_shared_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, output = plan(
        capsys,
        "role=prefill,name=p,host=10.0.0.1",
        "role=decode,name=d,host=10.0.0.1",
        "role=decode,name=e,host=10.0.0.2",
    )
    assert status == 0, output
    assert "ok    p to d: KV goes over shm or tcp" in output
    assert "ok    p to e: KV goes over tcp" in output
    assert "; not over shm: 10.0.0.1 and 10.0.0.2 are two hosts\n" in output


def test_plan_lists_the_usable_transports(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = plan(
        capsys,
        "role=prefill,name=p,backend=ascend,generation=A2,tp=4",
        "role=decode,name=d,backend=ascend,generation=A2,tp=2",
        "role=decode,name=e,backend=ascend,generation=A3,tp=3",
    )
    assert status == 0, output
    assert "ok    p to d: KV goes over hccs or staged\n" in output
    assert (
        "ok    p to e: KV goes over staged; not over hccs: it needs the same device generation "
        "on both sides, but prefill has 'A2' and decode 'A3'; it needs a tensor-parallel size of "
        "prefill that is a multiple of decode's, but they are 4 and 3\n"
    ) in output


@pytest.mark.parametrize(
    ("instance", "wanted"),
    [
        ("backend=ascend,block_size=16", "block_size 16 is not supported: ascend has 128"),
        ("backend=ascend,generation=A5", "ascend has no generation 'A5'; known are A2, A3"),
        ("backend=tpu", "no installed plugin offers backend 'tpu'"),
    ],
)
def test_unsupported_request_of_absent_hardware_is_reported(
    capsys: pytest.CaptureFixture[str], instance: str, wanted: str
) -> None:
    status, output = plan(capsys, instance)
    assert status == 1
    assert wanted in output


def test_pair_without_a_common_transport_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    links_alone = replace(ASCEND, transports={"hccs": ASCEND.transports["hccs"]})
    monkeypatch.setattr(Registry, "known_hardware", lambda self, name: links_alone)
    status, output = plan(
        capsys,
        "role=prefill,name=p,backend=ascend,generation=A2",
        "role=decode,name=d,backend=ascend,generation=A3",
    )
    assert status == 1
    assert "p and d: hccs: it needs the same device generation on both sides" in output


def test_invalid_peer_url_is_rejected_with_the_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--peer", "p0"]) == 1
    assert capsys.readouterr().out == (
        "FAIL  HTTP of p0: wanted --peer http://HOST:PORT, its --host and --port\n"
    )


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"\x00\x10challenge", "does not speak HTTP (BadStatusLine): wanted --port of an instance"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "is another server, not a mooncake-engine instance"),
        (b"HTTP/1.1 200 OK\r\n\r\n[5]", "is another server, not a mooncake-engine instance"),
    ],
)
def test_peer_that_is_no_instance_is_reported(
    answer: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        status = cli.main(["doctor", "--peer", f"http://127.0.0.1:{listener.getsockname()[1]}"])
        thread.join()
    assert status == 1
    assert problem in capsys.readouterr().out


def test_impossible_port_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = plan(capsys, "role=both,http=99999")
    assert (status, output) == (1, "FAIL  deployment: HTTP: wanted a port, 0 to 65535, got 99999\n")
