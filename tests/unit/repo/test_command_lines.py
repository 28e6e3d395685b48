"""Every command line in the deployment files and guides is accepted by the programs' own
parsers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest
from support.deploy import (
    DEPLOY,
    ROOT,
    all_flags,
    compose,
    compose_commands,
    deployments,
    document_commands,
    document_flags,
    environment_of,
    manifests,
    parse,
    pod_command,
    read_yaml,
    unit_command,
)

from mooncake_engine.config import Role
from mooncake_engine.core_client import _EXIT_TIMEOUT_S
from mooncake_engine.instance_arguments import kv_transfer_config
from mooncake_hal.options import byte_count
from mooncake_hal.port_range import PortRange
from mooncake_kv.cli import DRAIN_S
from mooncake_kv.pool.pool_config import read_kv_pool
from mooncake_kv.store.ssd_tier import CLOSE_TIMEOUT_S
from mooncake_proxy.config_from_options import config_from
from mooncake_proxy.pool.kubernetes import KubernetesConfig, PodList, specs_of_pods
from mooncake_proxy.pool.pool_file import parse_pool_file

SYSTEMD = DEPLOY / "systemd"
COMPOSE = compose_commands()
WITH_STORE = compose_commands("compose.store.yaml")
WITH_KEYS = compose_commands("compose.keys.yaml")
PODS = {name: pod_command(template) for name, template in deployments().items()}
STORE_FOLDER = "kubernetes-with-store"
[STORE_POD] = deployments(STORE_FOLDER, "DaemonSet").values()
PODS_WITH_STORE = {
    name: pod_command(template)
    for name, template in (deployments(STORE_FOLDER) | {"mooncake-store": STORE_POD}).items()
}
KEYS_FOLDER = "kubernetes-with-keys"
PROXY_POD_WITH_KEYS = deployments(KEYS_FOLDER)["mooncake-proxy"]
UNITS = {
    "engine": unit_command(
        SYSTEMD / "mooncake-engine@.service", environment_of(SYSTEMD / "engine.env.example")
    ),
    "kv": unit_command(SYSTEMD / "mooncake-kv.service", environment_of(SYSTEMD / "kv.env.example")),
    "proxy": unit_command(
        SYSTEMD / "mooncake-proxy.service", environment_of(SYSTEMD / "proxy.env.example")
    ),
}
DOCUMENTS = dict(document_commands())
EVERYWHERE = {
    **{f"compose {name}": command for name, command in COMPOSE.items()},
    **{f"compose with store {name}": command for name, command in WITH_STORE.items()},
    **{f"compose with keys {name}": command for name, command in WITH_KEYS.items()},
    **{f"kubernetes {name}": command for name, command in PODS.items()},
    **{f"kubernetes with store {name}": command for name, command in PODS_WITH_STORE.items()},
    "kubernetes with keys": pod_command(PROXY_POD_WITH_KEYS),
    **{f"systemd {name}": command for name, command in UNITS.items()},
    **DOCUMENTS,
}


@pytest.mark.parametrize("command", EVERYWHERE.values(), ids=EVERYWHERE)
def test_program_accepts_flags(command: list[str]) -> None:
    parse(command)


def test_unknown_flag_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*COMPOSE["proxy"], "--decoder=http://x:1"])
    assert "--decoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("mooncake-proxy", "--max-body-bytes"),
        ("mooncake-engine serve model", "--max-body-bytes"),
        ("mooncake-engine serve model", "--kv-cache-bytes"),
        ("mooncake-kv store --dram 1G", "--ssd-segment-bytes"),
    ],
)
def test_numbers_of_bytes_are_written_alike(
    program: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    for text in ("4096", "64KiB", "1.5M", "16MB", "2g", " 1 T"):
        args = parse([*program.split(), flag, text])
        assert getattr(args, field) == byte_count(text), text
    for text in ("many", "5X", "G", "nan", "-1K"):
        with pytest.raises(SystemExit):
            parse([*program.split(), f"{flag}={text}"])
        assert f"{flag}: wanted bytes such as 512M or 4G, got {text!r}" in capsys.readouterr().err


def test_guides_contain_command_lines() -> None:
    assert {where.split(":")[0] for where in DOCUMENTS} >= {
        "README.md",
        "conductor.md",
        "deployment.md",
        "hardware.md",
        "pool.md",
        "proxy.md",
        "serving.md",
    }


def test_flags_in_abbreviated_examples_exist() -> None:
    known = all_flags()
    named = list(document_flags())
    assert len(named) > 100
    assert [(where, flag) for where, flag in named if flag not in known] == []


def test_long_prompts_are_pulled_early_in_containers() -> None:
    address = compose()["services"]["proxy"]["networks"]["instances"]["ipv4_address"]
    for command, host in ((COMPOSE["proxy"], address), (PODS["mooncake-proxy"], "10.1.2.3")):
        config = config_from(parse(command))
        assert config.has_metaserver
        assert config.advertise_url == f"http://{host}:{config.port}"


@pytest.mark.parametrize("service", ["prefill-0", "decode-0"])
def test_compose_instances_bind_addresses_that_peers_and_proxy_use(service: str) -> None:
    args = parse(COMPOSE[service])
    assert args.kv_host == compose()["services"][service]["networks"]["instances"]["ipv4_address"]
    assert args.role == service.split("-")[0]
    proxy = parse(COMPOSE["proxy"])
    assert f"http://{service}:{args.port}" in getattr(proxy, args.role)


def test_compose_publishes_only_the_proxy() -> None:
    services = compose()["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"proxy": [f"127.0.0.1:8000:{parse(COMPOSE['proxy']).port}"]}


def test_compose_mounts_its_secret() -> None:
    for service in ("prefill-0", "decode-0"):
        [secret] = compose()["services"][service]["secrets"]
        assert str(parse(COMPOSE[service]).kv_secret_file) == f"/run/secrets/{secret}"


def test_compose_keys_are_added_to_the_same_proxy() -> None:
    content = compose("compose.keys.yaml")
    assert {*content["services"]} == {"proxy"}
    [secret] = content["services"]["proxy"]["secrets"]
    assert content["secrets"][secret] == {"file": f"secrets/{secret}"}
    assert WITH_KEYS["proxy"] == [*COMPOSE["proxy"], f"--api-key-file=/run/secrets/{secret}"]


def test_pod_and_unit_of_proxy_read_their_keys() -> None:
    pod = PROXY_POD_WITH_KEYS["spec"]
    [mount], [volume] = pod["containers"][0]["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    keys = parse(pod_command(PROXY_POD_WITH_KEYS)).api_key_file
    assert keys == f"{mount['mountPath']}/api-keys"
    assert volume["secret"]["defaultMode"] == 0o440, "for the group"
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    unit = (SYSTEMD / "mooncake-proxy.service").read_text()
    copied = "install -m 444 /etc/mooncake/api-keys /run/mooncake-proxy/\n"
    assert f"\nExecStartPre=+{copied}" in unit
    assert f"\nExecReload=+{copied}ExecReload=kill -HUP $MAINPID\n" in unit
    assert "\nRuntimeDirectory=mooncake-proxy\nRuntimeDirectoryMode=0700\n" in unit
    assert parse(UNITS["proxy"]).api_key_file == "/run/mooncake-proxy/api-keys"


def test_compose_waits_for_healthy_instances() -> None:
    waits = compose()["services"]["proxy"]["depends_on"]
    assert waits == {name: {"condition": "service_healthy"} for name in ("prefill-0", "decode-0")}


def test_compose_store_is_added_to_the_same_instances() -> None:
    store = parse(WITH_STORE["store"])
    added = f"--kv-pool=connect=store:{store.port}"
    for service in ("prefill-0", "decode-0"):
        assert WITH_STORE[service] == [*COMPOSE[service], added]
    services = compose("compose.store.yaml")["services"]
    assert {*services} == {"store", "prefill-0", "decode-0"}
    of_store, of_instance = services["store"], compose()["services"]["prefill-0"]
    for hardening in ("read_only", "cap_drop", "security_opt", "init", "image", "build", "secrets"):
        assert of_store[hardening] == of_instance[hardening]
    assert store.kv_host == of_store["networks"]["instances"]["ipv4_address"]
    assert "ports" not in of_store
    health = of_store["environment"]["MOONCAKE_HEALTH_URL"]
    assert health == f"http://{store.kv_host}:{store.metrics_port}/metrics"
    assert seconds(of_store["stop_grace_period"]) > DRAIN_S + CLOSE_TIMEOUT_S


def test_pods_connect_to_the_store_of_their_node() -> None:
    store = parse(PODS_WITH_STORE["mooncake-store"])
    for name in ("mooncake-prefill", "mooncake-decode"):
        found = PODS_WITH_STORE[name]
        assert found[:-1] == PODS[name]
        pool = read_kv_pool(parse(found).kv_pool)
        assert pool.connect == (("10.0.0.3", store.port),)  # the node's address
    [container] = STORE_POD["spec"]["containers"]
    assert container["ports"] == [
        {"name": "store", "containerPort": store.port, "hostPort": store.port},
        {"name": "metrics", "containerPort": store.metrics_port},
    ]
    assert STORE_POD["metadata"]["annotations"]["prometheus.io/port"] == str(store.metrics_port)


def test_store_pod_has_its_memory_files_and_time_to_stop() -> None:
    store, pod = parse(PODS_WITH_STORE["mooncake-store"]), STORE_POD["spec"]
    [container] = pod["containers"]
    memory = {kind: container["resources"][kind]["memory"] for kind in ("requests", "limits")}
    assert memory["requests"] == memory["limits"]
    assert byte_count(memory["limits"]) >= store.dram + (2 << 30)
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + CLOSE_TIMEOUT_S
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {str(store.kv_secret_file.parent), "/var/cache/mooncake", "/tmp"}
    engine = deployments()["mooncake-prefill"]["spec"]
    assert container["image"] == engine["containers"][0]["image"]
    assert container["securityContext"] == engine["containers"][0]["securityContext"]
    assert pod["securityContext"] == engine["securityContext"]


def test_only_instances_and_prometheus_reach_a_store_beyond_its_port() -> None:
    policies = {
        item["metadata"]["name"]: item["spec"]
        for item in manifests(STORE_FOLDER)
        if item["kind"] == "NetworkPolicy"
    }
    store = parse(PODS_WITH_STORE["mooncake-store"])
    policy = policies["mooncake-store"]
    labels = STORE_POD["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    engines = policies["mooncake-engine"]
    assert not engines["podSelector"]["matchLabels"].items() <= labels.items()
    to_store, to_metrics, from_instances = policy["ingress"]
    assert to_store == {"ports": [{"protocol": "TCP", "port": store.port}]}
    assert to_metrics["ports"] == [{"protocol": "TCP", "port": store.metrics_port}]
    assert to_metrics["from"] == engines["ingress"][0]["from"][1:]
    assert from_instances == engines["ingress"][1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_declare_their_ports(role: str) -> None:
    template = deployments()[f"mooncake-{role}"]
    [container] = template["spec"]["containers"]
    args = parse(pod_command(template))
    ports = [port["containerPort"] for port in container["ports"]]
    assert ports == [args.port, args.kv_port]  # the proxy uses the first
    assert args.role == role
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(args.port)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pods_mount_the_paths_in_their_arguments(role: str) -> None:
    template = deployments()[f"mooncake-{role}"]
    [container] = template["spec"]["containers"]
    args = parse(pod_command(template))
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(args.kv_secret_file.parent), str(args.model.parent), "/tmp"} <= mounts
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def test_proxy_selector_matches_pods() -> None:
    config = config_from(parse(PODS["mooncake-proxy"]))
    assert config.kubernetes is not None
    wanted = KubernetesConfig.parse(config.kubernetes, "http://api")
    label, value = wanted.selector.split("=")
    running = [
        template | {"status": {"podIP": "10.0.0.9", "conditions": [READY]}}
        for template in deployments().values()
        if template["metadata"]["labels"].get(label) == value
    ]
    found = specs_of_pods(msgspec.convert({"items": running}, PodList))
    assert sorted((spec.role.value, spec.origin.port) for spec in found) == [
        ("decode", 8100),
        ("prefill", 8100),
    ]
    assert {item["metadata"].get("namespace", "mooncake") for item in manifests()} == {
        wanted.namespace
    }


READY = {"type": "Ready", "status": "True"}


def test_proxy_may_only_list_pods() -> None:
    [role] = [item for item in manifests() if item["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    [binding] = [item for item in manifests() if item["kind"] == "RoleBinding"]
    account = deployments()["mooncake-proxy"]["spec"]["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account]


def test_network_policy_allows_proxy_and_prometheus() -> None:
    [policy] = [item for item in manifests() if item["kind"] == "NetworkPolicy"]
    to_api, from_peers = policy["spec"]["ingress"]
    assert to_api["ports"] == [{"protocol": "TCP", "port": parse(PODS["mooncake-prefill"]).port}]
    assert "ports" not in from_peers  # transports bind free ports
    proxy, prometheus = to_api["from"]
    assert prometheus == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }
    [other] = from_peers["from"]
    for peer, name in ((proxy, "mooncake-proxy"), (other, "mooncake-prefill")):
        labels = deployments()[name]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("folder", "bases"),
    [
        ("kubernetes", set()),
        (STORE_FOLDER, {"../kubernetes"}),
        (KEYS_FOLDER, {"../kubernetes"}),
    ],
)
def test_every_manifest_is_applied(folder: str, bases: set[str]) -> None:
    files = {path.name for path in (DEPLOY / folder).glob("*.yaml")}
    [kustomization] = read_yaml(DEPLOY / folder / "kustomization.yaml")
    assert {*kustomization["resources"]} == files - {"kustomization.yaml"} | bases


def test_pool_file_names_the_example_instance() -> None:
    path = SYSTEMD / "pool.json"
    specs = parse_pool_file(path.read_bytes(), str(path))
    engine = parse(UNITS["engine"])
    assert (engine.role, f"http://{engine.host}:{engine.port}") in [
        (spec.role.value, spec.name) for spec in specs
    ]
    assert {spec.role.value for spec in specs} == {"prefill", "decode"}


def test_instances_of_every_kind_transfer_kv() -> None:
    for command in (COMPOSE["prefill-0"], PODS["mooncake-decode"], UNITS["engine"]):
        args = parse(command)
        args.kv_secret_file = None  # exists on the host that it is deployed to
        config = kv_transfer_config(args)
        assert config is not None
        assert (config.host, config.port) == (args.kv_host, args.kv_port)
        assert config.host not in ("0.0.0.0", "127.0.0.1"), (
            "peers on other hosts receive this address"
        )
        assert Role(args.role) is not Role.BOTH


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def longest_stop_s(command: list[str]) -> float:
    """How long a process may take to stop: its requests, and an instance's ranks after them."""
    args = parse(command)
    ranks_s = _EXIT_TIMEOUT_S if hasattr(args, "tp_size") else 0.0
    return float(args.shutdown_timeout) + ranks_s


@pytest.mark.parametrize("name", PODS)
def test_pod_grace_period_covers_shutdown_timeout(name: str) -> None:
    pod = deployments()[name]["spec"]
    _, asleep = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(asleep) + longest_stop_s(PODS[name])


@pytest.mark.parametrize("name", COMPOSE)
def test_container_grace_period_covers_shutdown_timeout(name: str) -> None:
    given = seconds(compose()["services"][name]["stop_grace_period"])
    assert given > longest_stop_s(COMPOSE[name])


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("engine", "mooncake-engine@.service"),
        ("proxy", "mooncake-proxy.service"),
        ("kv", "mooncake-kv.service"),
    ],
)
def test_unit_stop_timeout_covers_shutdown_timeout(name: str, unit: str) -> None:
    [given] = re.findall(r"^TimeoutStopSec=(\d+)$", (SYSTEMD / unit).read_text(), re.MULTILINE)
    wanted = DRAIN_S + CLOSE_TIMEOUT_S if name == "kv" else longest_stop_s(UNITS[name])
    assert int(given) > wanted


def test_ascend_units_run_the_same_command_in_canns_environment() -> None:
    environment = environment_of(SYSTEMD / "engine.env.example")
    launcher, script, *command = unit_command(SYSTEMD / "ascend.conf", environment)
    assert launcher == "bash"
    assert (DEPLOY / "docker" / Path(script).name).is_file()
    assert command == ["/opt/mooncake/bin/mooncake-engine", *UNITS["engine"][1:]]


def test_port_range_in_guides_is_free_on_every_host() -> None:
    """The port ranges reserved on NPU hosts, and the kernel's range for outgoing connections."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    ranges = [PortRange.parse(words) for words in re.findall(r"--kv-port-range\s+(\d+-\d+)", text)]
    assert ranges
    assert all(found.first > 1023 and found.last < 15_000 for found in ranges)


def test_make_up_names_the_engines_that_exist() -> None:
    done = subprocess.run(
        ["make", "-n", "up", "ENGINE=vlm"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "ENGINE=vlm: wanted mooncake or vllm" in done.stderr
