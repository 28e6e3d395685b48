"""The commands of ``mooncake-kv`` that inspect a store, and their errors."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mooncake_hal.errors import VersionMismatch
from mooncake_hal.negotiation import Transports
from mooncake_hal.registry import Registry
from mooncake_hal.transport import EndpointOptions
from mooncake_kv import cli
from mooncake_kv.store import store_client, store_messages
from mooncake_kv.store.chunk_store import Chunk
from mooncake_kv.store.node_store import NodeStore, NodeStoreConfig
from mooncake_kv.store.store_service import StoreAddress, StoreService

NBYTES = 64 << 10
SECRET = "a deployment's secret"


@pytest.fixture
def store(tmp_path):
    """A store with two chunks, and ``run``, which runs a command about it."""
    quotas = {"team-a": 4 * NBYTES}
    store = NodeStore(NodeStoreConfig(8 * NBYTES, quotas=quotas))
    options = EndpointOptions(secret=SECRET.encode())
    transports = Transports.open(Registry.discover(), options, wanted="shm")
    address = StoreAddress("127.0.0.1", 0, SECRET.encode())
    service = StoreService.start(store, transports, address)
    user = store.open_user()
    chunks = [Chunk(b"a" * 16, None, 0, NBYTES, 16, "team-a")]
    chunks.append(Chunk(b"b" * 16, b"a" * 16, 1, NBYTES, 16, "x\n\x1b[31m y"))
    user.commit(user.reserve(chunks).result()).result()
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET)

    def run(*words):
        where = ["--port", str(service.port), "--kv-secret-file", str(secret_file)]
        return cli.main([*words, *where])

    yield SimpleNamespace(run=run, service=service, secret_file=secret_file)
    user.close()
    service.close()
    transports.close()
    store.close()


def test_ls_shows_names_of_tenants_on_their_own_line(store, capsys):
    """A client chooses the name: it must neither forge lines nor reach the terminal."""
    assert store.run("ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"dram {'61' * 16} 0 {NBYTES} team-a",
        rf"dram {'62' * 16} 1 {NBYTES} x\n\x1b[31m y",
    ]
    assert store.run("ls", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        **{"tier": "dram", "key": "61" * 16, "parent": None, "position": 0},
        **{"num_tokens": 16, "nbytes": NBYTES, "tenant": "team-a"},
    }
    assert (second["tenant"], second["parent"]) == ("x\n\x1b[31m y", "61" * 16)


def test_results_are_printed_as_json(store, capsys):
    assert store.run("verify", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"num_intact": 0, "num_damaged": 0}
    assert store.run("drop", "--json", "--key", "61" * 16, "--key", "00" * 16) == 0
    assert json.loads(capsys.readouterr().out) == {"num_dropped": 1}
    assert store.run("stats", "--json") == 0
    assert json.loads(capsys.readouterr().out)["num_chunks"] == 1


@pytest.mark.parametrize("key", ["xyz", "", "0"])
def test_drop_rejects_what_is_no_key(store, capsys, key):
    with pytest.raises(SystemExit, match="2"):
        store.run("drop", "--key", "00" * 16, "--key", key)
    assert f"--key: wanted a key in hexadecimal, as ls prints, got '{key}'" in (
        capsys.readouterr().err
    )


def test_stats_show_use_of_quotas_but_metrics_name_no_tenant(store, capsys):
    assert store.run("stats") == 0
    out = capsys.readouterr().out
    assert f"tenant_bytes            team-a {NBYTES}\n" in out
    assert f"tenant_quota_bytes      team-a {4 * NBYTES}\n" in out
    assert store.run("stats", "--prometheus") == 0
    assert "team-a" not in capsys.readouterr().out


def test_wrong_secret_is_named_as_the_reason(store, capsys):
    store.secret_file.write_text("another deployment's secret")
    assert store.run("stats") == 1
    error = capsys.readouterr().err
    assert "rejects this command" in error
    assert "does not know this deployment's secret" in error
    assert "no --kv-secret-file" not in error


def test_missing_secret_is_named_as_the_reason(store, capsys):
    assert cli.main(["stats", "--port", str(store.service.port)]) == 1
    assert capsys.readouterr().err.endswith("; no --kv-secret-file was given\n")


def test_reason_is_printed_once(store):
    """The client logs it as well, for engines."""
    store.secret_file.write_text("another deployment's secret")
    words = ["stats", "--port", str(store.service.port), "--kv-secret-file", str(store.secret_file)]
    command = f"from mooncake_kv.cli import main; raise SystemExit(main({words}))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("does not know this deployment's secret") == 1


def test_store_of_another_release_is_named_as_the_reason(store, capsys, monkeypatch):
    theirs = store_messages.STORE_PROTOCOL_VERSION
    monkeypatch.setattr(store_messages, "STORE_PROTOCOL_VERSION", 99)
    assert store.run("stats") == 1
    reason = f"we speak version 99, the peer {theirs}; run one release"
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("stats",), ("drop", "--key", "00"), ("drop", "--all"), ("verify",), ("ls",)]
)
def test_store_that_is_gone_after_connecting_is_an_error(store, capsys, monkeypatch, words):
    async def request(*_):
        raise VersionMismatch("gone")

    monkeypatch.setattr(store_client.StoreClient, "_request", request)
    assert store.run(*words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no store answers at 127.0.0.1" in captured.err


@pytest.mark.parametrize("port", ["70000", "-1", "x"])
@pytest.mark.parametrize("words", [("stats", "--port"), ("store", "--dram=1M", "--metrics-port")])
def test_invalid_port_is_a_usage_error(words, port, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words[:-1], f"{words[-1]}={port}"])
    assert ended.value.code == 2
    assert "wanted a port, 0 to 65535" in capsys.readouterr().err


def test_port_in_use_is_named(capsys, monkeypatch):
    monkeypatch.setattr(cli.LogSettings, "apply", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["store", "--dram", "1M", "--port", port]) == 1
        error = capsys.readouterr().err
        assert f"can't listen on 127.0.0.1:{port}: the port is in use, choose another" in error
        assert cli.main(["store", "--dram", "1M", "--port", "0", "--metrics-port", port]) == 1
    assert "choose another one with --metrics-port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--quarantine-seconds", "-1"], "--quarantine-seconds must be in [0, 86400], got -1"),
        (["--tenant-quota", "x=-5"], "--tenant-quota: wanted bytes such as 512M or 4G, got '-5'"),
        (["--ssd-segment-bytes", "0"], "are 262144 segments of 0; a directory needs 3 or more"),
    ],
)
def test_store_does_not_start_with_impossible_numbers(tmp_path, capsys, words, message):
    ssd = ["--ssd", f"{tmp_path}:1GiB"]
    try:
        status = cli.main(["store", "--dram", "1MiB", "--port", "0", *ssd, *words])
    except SystemExit as exc:
        status = exc.code
    assert status in (1, 2)
    assert message in capsys.readouterr().err
