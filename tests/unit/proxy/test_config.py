"""Configuration errors are reported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from mooncake_proxy.cli import main
from mooncake_proxy.config import AdmissionConfig, ConductorConfig, ProxyConfig, TlsConfig
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.errors import (
    ConfigError,
)
from mooncake_proxy.http1.http_wire import Origin
from mooncake_proxy.http1.server_connection import ServerLimits
from mooncake_proxy.http1.upstream_connection import ClientLimits
from mooncake_proxy.pool.health_checks import HealthConfig
from mooncake_proxy.pool.instance_reports import KVEventEndpoints
from mooncake_proxy.pool.instances import InstanceSpec, Role
from mooncake_proxy.proxy_options import build_parser


def spec(port: int, source: str, role: Role = Role.DECODE) -> InstanceSpec:
    return InstanceSpec(Origin("http", "h", port), role, source=source)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": "pull-push"}, "--flow 'pull-push': wanted one of pull, push"),
        ({"prefill_policy": "best"}, "--prefill-policy 'best'"),
        ({"port": 70000}, "--port 70000"),
        ({"workers": 0}, "--workers 0"),
        ({"admin_port": 70000}, "--admin-port 70000"),
        ({"admin_port": 0, "workers": 2}, "--admin-port 0: with several workers"),
        ({"port": 8001, "admin_port": 8001}, "--admin-port 8001: wanted another one than --port"),
        ({"conductor": ConductorConfig(kv_tokens=0)}, "--kv-tokens 0: wanted 1 or more"),
        ({"conductor": ConductorConfig(max_batch=-1)}, "--max-batch -1: wanted 1 or more"),
        ({"conductor": ConductorConfig(link_gb_s=0)}, "--link-gb-s 0: wanted more than 0 GB/s"),
        ({"conductor": ConductorConfig(link_gb_s=math.nan)}, "--link-gb-s nan: wanted more than"),
        ({"tls": TlsConfig(key="key.pem")}, "--tls-key key.pem: wanted --tls-cert as well"),
        ({"cache_salt_per_key": True}, "--cache-salt-per-key: wanted --api-key-file"),
        ({"otlp_endpoint": "nonsense"}, "--otlp-endpoint 'nonsense': wanted the URL"),
        ({"otlp_endpoint": "collector:4318"}, "such as http://collector:4318"),
        ({"otlp_endpoint": "http://collector:port"}, "--otlp-endpoint"),
        ({"flow": "push", "host": "::"}, "--advertise-url"),
        ({"advertise_url": "xyz"}, "--advertise-url 'xyz': wanted where decode instances"),
        ({"health": HealthConfig(path="health")}, "--health-path 'health': wanted a path"),
        ({"health": HealthConfig(interval_s=-1)}, "--health-interval -1: wanted 0 or more"),
        ({"health": HealthConfig(interval_s=math.nan)}, "--health-interval nan: wanted 0"),
        ({"health": HealthConfig(timeout_s=0)}, "--health-timeout 0: wanted more than 0"),
        ({"health": HealthConfig(rise=0)}, "--health-rise 0: wanted 1 or more"),
        ({"health": HealthConfig(fall=0)}, "--health-fall 0: wanted 1 or more"),
        ({"client": ClientLimits(connect_timeout_s=-2)}, "--connect-timeout -2: wanted more"),
        ({"client": ClientLimits(first_byte_timeout_s=0)}, "--first-byte-timeout 0: wanted"),
        ({"client": ClientLimits(stall_timeout_s=0)}, "--stall-timeout 0: wanted more than 0"),
        ({"request_timeout_s": -1}, "--request-timeout -1: wanted more than 0 seconds"),
        ({"server": ServerLimits(max_body_bytes=-1)}, "--max-body-bytes -1: wanted 1 or more"),
        ({"admission": AdmissionConfig(max_running=-1)}, "--max-running -1: wanted 0 or more"),
        ({"admission": AdmissionConfig(max_waiting=-1)}, "--max-waiting -1: wanted 0 or more"),
        ({"admission": AdmissionConfig(max_wait_s=-1)}, "--max-wait -1: wanted 0 or more"),
        ({"eject_after": -1}, "--eject-after -1: wanted 0 or more"),
        ({"retry_ratio": -0.1}, "--retry-ratio -0.1: wanted 0 or more"),
        ({"instances": (spec(1, "a"), spec(1, "b", Role.PREFILL))}, "http://h:1 given twice"),
    ],
)
def test_configuration_errors_are_reported(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**settings)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    "flag", ["--prefill-bootstrap-port", "--kv-events-port", "--kv-events-replay-port"]
)
@pytest.mark.parametrize("port", [0, 65536])
def test_ports_of_instances_are_checked(
    flag: str, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--backend-url", "http://h:1", flag, str(port)]) == 2
    assert f"mooncake-proxy: {flag} {port}: wanted 1 to 65535" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--data-parallel-size 0", "--data-parallel-size 0: wanted 1 to 1024"),
        ("--data-parallel-size 1025", "--data-parallel-size 1025: wanted 1 to 1024"),
        ("--data-parallel-size 8 --kv-events-port 65529", "-port 65529: wanted 1 to 65528"),
    ],
)
def test_ranks_of_instances_are_checked(
    given: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--backend-url", "http://h:1", *given.split()]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--tls-cert", "--upstream-ca"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_invalid_certificates_are_reported(
    flag: str, content: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "certificate.pem"
    if content is not None:
        path.write_text(content)
    pair = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
    unchecked = ("--health-interval", "0", "--log-level", "error")
    assert main(["--port", "0", *pair, *unchecked, flag, str(path)]) == 2
    stderr = capfd.readouterr().err
    assert f"mooncake-proxy: {flag} {path}: wanted" in stderr
    assert "Traceback" not in stderr


def test_short_prompt_tokens_names_what_it_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--short-prompt-tokens", "some"])
    assert "wanted a number of tokens, or auto, found 'some'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["s1:5557", "=tcp://s1:5557", "m=tcp://*:5557"])
def test_wrong_events_of_a_store_are_reported(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--backend-url", "http://h:1", "--store-kv-events", text]) == 2
    assert "mooncake-proxy: --store-kv-events: KV events of a store" in capfd.readouterr().err


def test_pods_get_what_options_declare_of_every_instance() -> None:
    command = (
        "--kubernetes ns/app=x --prefill h:1 --decode h:2 --prefill-bootstrap-port 8998 "
        "--kv-events-port 5557 --kv-events-replay-port 5657 --data-parallel-size 2 "
        "--decode-emits-first-token --decode-recomputes"
    )
    config = config_from(build_parser().parse_args(command.split()))
    for spec in config.instances:
        assert spec == config.instance_defaults.spec(spec.origin, spec.role, "flags", ())
    assert [each.bootstrap_port for each in config.instances] == [8998, None]
    assert [each.data_parallel_size for each in config.instances] == [2, 2]


def test_instances_use_the_stores_of_their_model() -> None:
    argv = ["--backend-url", "m,alias=http://h:1", "--backend-url", "http://h:2"]
    for text in ("m=tcp://s1:5557,6d", "m=tcp://s2:5557", "tcp://s3:5557"):
        argv += ["--store-kv-events", text]
    named, unnamed = config_from(build_parser().parse_args(argv)).instances
    first, second, third = (KVEventEndpoints(f"tcp://s{number}:5557") for number in (1, 2, 3))
    assert named.store_kv_events == (replace(first, namespace="6d"), second)
    assert unnamed.store_kv_events == (third,)


@pytest.mark.parametrize(
    ("host", "has_keys", "is_open"),
    [
        ("0.0.0.0", False, True),
        ("", False, True),
        ("10.0.0.1", False, True),
        ("0.0.0.0", True, False),
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("localhost", False, False),
    ],
)
def test_open_address_without_keys_is_reported_at_start(
    host: str,
    has_keys: bool,
    is_open: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake_proxy.serving.run", lambda config: 0)
    keys = tmp_path / "keys"
    keys.write_text("sk-5f0c2d9e71b84a36\n")
    argv = ["--host", host, "--port", "8000", "--backend-url", "http://h:1"]
    assert main([*argv, *(["--api-key-file", str(keys)] if has_keys else [])]) == 0
    assert ("without --api-key-file: whoever reaches port 8000" in caplog.text) is is_open


@pytest.mark.parametrize(
    ("options", "pace"),
    [
        ("", (1.0, 2.0)),
        ("--flow sglang", (10.0, 22.0)),  # its /health answers within 20 s
        ("--flow sglang --health-interval 0 --health-timeout 3", (0.0, 3.0)),
    ],
)
def test_pace_of_health_checks_is_that_of_the_flow(options: str, pace: tuple[float, float]) -> None:
    health = config_from(build_parser().parse_args(options.split())).health
    assert (health.interval_s, health.timeout_s) == pace


@pytest.mark.parametrize(
    ("options", "is_off"),
    [
        ("--host 0.0.0.0 --prefill http://p:1 --decode http://d:1", True),
        ("--host :: --kubernetes ns/app=engine", True),
        ("--host 0.0.0.0 --backend-url http://h:1", False),
        ("--host 10.0.0.1 --prefill http://p:1 --decode http://d:1", False),
        ("--host 0.0.0.0 --advertise-url http://10.0.0.1:80 --decode http://d:1", False),
        ("--host 0.0.0.0 --early-pull-tokens 0 --decode http://d:1", False),
        ("--host 0.0.0.0 --flow sglang --decode http://d:1", False),
        ("--host 0.0.0.0 --decode-emits-first-token --decode http://d:1", False),
    ],
)
def test_early_pulls_that_lack_an_address_are_reported_at_start(
    options: str,
    is_off: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake_proxy.serving.run", lambda config: 0)
    assert main(options.split()) == 0
    assert ("early pulls are off" in caplog.text) is is_off


def test_each_secret_of_a_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "secrets"
    parse = build_parser().parse_args
    args = parse(["--backend-url", "http://d:1", "--register-secret-file", str(path)])
    path.write_text(" the-newer-of-two\n\nthe-older-of-the-two\n")
    assert config_from(args).register_secret == "the-newer-of-two\nthe-older-of-the-two"
    path.write_text("the-newer-of-two\nshort\n")
    with pytest.raises(ConfigError, match=r"holds a secret of 5 bytes, which can be guessed"):
        config_from(args)
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"is empty: wanted the secret that is shared"):
        config_from(args)
