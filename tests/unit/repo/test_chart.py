"""The Helm chart, as rendered by ``make check-deploy``: it has the objects of deploy/kubernetes and
valid command lines."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from support.deploy import DEPLOY, deployments, manifests, parse, pod_command, read_yaml

GOLDEN = DEPLOY / "helm" / "golden"


def objects(name: str) -> list[dict[str, Any]]:
    """The objects of a golden file, which starts with a separator."""
    return [found for found in read_yaml(GOLDEN / name) if found is not None]


def pods(name: str) -> dict[str, dict[str, Any]]:
    """Pod templates of a golden file's Deployments and DaemonSets, by name."""
    return {
        found["metadata"]["name"]: found["spec"]["template"]
        for found in objects(name)
        if found["kind"] in ("Deployment", "DaemonSet")
    }


def policies(name: str) -> dict[str, list[dict[str, Any]]]:
    """The ingress rules of a golden file's network policies, by name."""
    return {
        found["metadata"]["name"]: found["spec"]["ingress"]
        for found in objects(name)
        if found["kind"] == "NetworkPolicy"
    }


WITH_STORE = ("with-store.yaml", "kubernetes-with-store")


@pytest.mark.parametrize(
    ("file", "folder", "name"),
    [
        ("default.yaml", "kubernetes", "mooncake-prefill"),
        ("default.yaml", "kubernetes", "mooncake-decode"),
        ("default.yaml", "kubernetes", "mooncake-proxy"),
        (*WITH_STORE, "mooncake-prefill"),
        (*WITH_STORE, "mooncake-decode"),
        (*WITH_STORE, "mooncake-store"),
    ],
)
def test_default_render_equals_kubernetes_manifests(file: str, folder: str, name: str) -> None:
    plain_pods = deployments(folder) | deployments(folder, "DaemonSet")
    ours, plain = pods(file)[name]["spec"], plain_pods[name]["spec"]
    [container], [wanted] = ours["containers"], plain["containers"]
    assert container.pop("imagePullPolicy") == "IfNotPresent"
    if name == "mooncake-proxy":  # of its own release
        selector = "app.kubernetes.io/name=mooncake-engine"
        own = f"--kubernetes=mooncake/app.kubernetes.io/instance=mooncake,{selector}"
        assert container["args"].count(own) == 1
        container["args"][container["args"].index(own)] = f"--kubernetes=mooncake/{selector}"
    assert container == wanted
    assert ours == plain


def test_proxy_selects_instances_of_its_release() -> None:
    for name, pod in pods("default.yaml").items():
        labels = pod["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "mooncake", name


def test_store_is_an_option() -> None:
    assert "mooncake-store" not in pods("default.yaml")
    assert {*policies("default.yaml")} == {"mooncake-engine"}
    plain = {
        found["metadata"]["name"]: found["spec"]["ingress"]
        for found in manifests("kubernetes-with-store")
        if found["kind"] == "NetworkPolicy"
    }
    [own] = policies("with-store.yaml")["mooncake-store"][-1]["from"]
    labels = own["podSelector"]["matchLabels"]
    assert labels.pop("app.kubernetes.io/instance") == "mooncake"  # of its own release
    rules = policies("with-store.yaml")["mooncake-store"]
    assert rules[:-1] == plain["mooncake-store"][:-1]
    assert plain["mooncake-store"][-1]["from"] == [own]


@pytest.mark.parametrize("file", ["default.yaml", "full.yaml", "pairs.yaml", "with-store.yaml"])
def test_programs_accept_command_lines(file: str) -> None:
    for pod in pods(file).values():
        [container] = pod["spec"]["containers"]
        container["image"] = container["image"].rpartition("/")[2]
        assert parse(pod_command(pod))


def test_pairs_form_one_pool_and_picker_reaches_decode_pods_through_sidecar() -> None:
    found = pods("pairs.yaml")
    assert set(found) == {"mooncake-prefill", "mooncake-decode"}
    [pool] = [o for o in objects("pairs.yaml") if o["kind"] == "InferencePool"]
    [target] = [port["number"] for port in pool["spec"]["targetPorts"]]
    for name, pod in found.items():
        labels = pod["metadata"]["labels"]
        assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert labels["llm-d.ai/role"] == labels["mooncake-hal/role"] == name.split("-")[1]
    [engine] = found["mooncake-prefill"]["spec"]["containers"]
    assert f"--port={target}" in engine["args"]
    assert "initContainers" not in found["mooncake-prefill"]["spec"]
    [engine] = found["mooncake-decode"]["spec"]["containers"]
    [sidecar] = found["mooncake-decode"]["spec"]["initContainers"]
    behind = engine["ports"][0]["containerPort"]
    assert sidecar["restartPolicy"] == "Always"
    assert {f"--port={target}", f"--vllm-port={behind}"} <= set(sidecar["args"])
    assert f"--port={behind}" in engine["args"]


def test_values_for_llm_d_chart_select_same_pods() -> None:
    [values] = read_yaml(DEPLOY / "helm" / "llm-d-router-values.yaml")
    servers, picker = values["router"]["modelServers"], values["router"]["epp"]
    [pool] = [o for o in objects("pairs.yaml") if o["kind"] == "InferencePool"]
    assert servers["matchLabels"] == pool["spec"]["selector"]["matchLabels"]
    assert servers["targetPorts"] == pool["spec"]["targetPorts"]
    config = msgspec.yaml.decode(picker["pluginsCustomConfig"][picker["pluginsConfigFile"]])
    known = {plugin["type"] for plugin in config["plugins"]}
    for profile in config["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= known


def test_full_render_uses_all_values() -> None:
    found = pods("full.yaml")
    names = ("prefill", "decode", "both", "proxy", "store")
    assert set(found) == {f"mooncake-{name}" for name in names}
    [engine] = found["mooncake-prefill"]["spec"]["containers"]
    assert engine["image"] == "registry.example/mooncake-engine:cuda-0.1.0"
    assert "--max-num-batched-tokens=8192" in engine["args"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 1
    paths = [
        mount["mountPath"]
        for mount in found["mooncake-decode"]["spec"]["containers"][0]["volumeMounts"]
    ]
    assert paths[-3:] == ["/usr/local/Ascend/driver", "/etc/hccn.conf", "/dev/shm"]
    [pool] = [o for o in objects("full.yaml") if o["kind"] == "InferencePool"]
    labels = found["mooncake-both"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_full_render_adds_variables_volumes_and_startup_time() -> None:
    found = pods("full.yaml")
    pod = found["mooncake-decode"]["spec"]
    [engine] = pod["containers"]
    assert {"name": "HCCL_BUFFSIZE", "value": "4000"} in engine["env"]
    assert pod["volumes"][-1]["name"] == engine["volumeMounts"][-1]["name"] == "shared-memory"
    assert pod["hostNetwork"] is True
    prefill = found["mooncake-prefill"]
    assert prefill["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    probe = prefill["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3605, "3601 s, in whole periods"
    [deadline] = [
        found["spec"]["progressDeadlineSeconds"]
        for found in objects("full.yaml")
        if found["metadata"]["name"] == "mooncake-prefill"
    ]
    assert deadline > 3605, "the rollout has not failed while a model loads"
    assert "hostNetwork" not in prefill["spec"]


def test_replicas_of_autoscaled_role_are_left_alone() -> None:
    specs = {o["metadata"]["name"]: o["spec"] for o in objects("full.yaml") if "spec" in o}
    assert "replicas" not in specs["mooncake-decode"]
    assert specs["mooncake-prefill"]["replicas"] == 2


def test_proxy_reads_keys_of_secret_and_has_admin_port() -> None:
    template = pods("full.yaml")["mooncake-proxy"]
    pod = template["spec"]
    [container] = pod["containers"]
    args = parse(["mooncake-proxy", *container["args"]])
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "keys"]
    assert args.api_key_file == f"{mount['mountPath']}/api-keys"
    assert args.admin_key_file == f"{mount['mountPath']}/admin-keys"
    [secret] = [each["secret"] for each in pod["volumes"] if each["name"] == "keys"]
    assert secret == {"secretName": "client-keys", "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == 10001, "who may read the files"
    assert [port["containerPort"] for port in container["ports"]] == [args.port, args.admin_port]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(args.admin_port)


@pytest.mark.parametrize(
    ("vendor", "device"), [("cuda", "nvidia.com/gpu"), ("ascend", "huawei.com/Ascend910")]
)
def test_accelerator_values_let_kv_have_the_device(vendor: str, device: str) -> None:
    [defaults] = read_yaml(DEPLOY / "helm" / "mooncake" / "values.yaml")
    [values] = read_yaml(DEPLOY / "helm" / f"{vendor}-values.yaml")
    schema = json.loads((DEPLOY / "helm" / "mooncake" / "values.schema.json").read_text())
    jsonschema.validate(merged(defaults, values), schema)
    assert "--kv-cache-bytes=4G" in defaults["engineArgs"], "what must not stay"
    assert values["engineArgs"] == []
    for role in values["roles"].values():
        assert role["resources"]["limits"][device] == 1


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm merges them: maps key by key, everything else as a whole."""
    result = dict(values)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(values.get(key), dict)
        result[key] = merged(values[key], value) if both else value
    return result


def test_store_mounts_its_drives_and_instances_use_its_port() -> None:
    found = pods("full.yaml")
    pod = found["mooncake-store"]["spec"]
    [store] = pod["containers"]
    args = parse(["mooncake-kv", *store["args"]])
    assert (args.dram, args.port) == (64 << 30, 7711)
    volumes = {each["name"]: each.get("hostPath") for each in pod["volumes"]}
    drives = {
        mount["mountPath"]: volumes[mount["name"]]["path"]
        for mount in store["volumeMounts"]
        if volumes[mount["name"]]
    }
    assert drives == {"/ssd/0": "/mnt/nvme0/mooncake", "/ssd/1": "/mnt/nvme1/mooncake"}
    assert [(str(path), size) for path, size in args.ssd] == [
        ("/ssd/0", 200 << 30),
        ("/ssd/1", 200 << 30),
    ]
    assert pod["tolerations"] == found["mooncake-prefill"]["spec"]["tolerations"]
    assert pod["nodeSelector"] == found["mooncake-prefill"]["spec"]["nodeSelector"]
    for name in ("mooncake-prefill", "mooncake-decode", "mooncake-both"):
        [engine] = found[name]["spec"]["containers"]
        assert "--kv-pool=connect=$(HOST_IP):7711" in engine["args"]


def test_only_proxy_and_named_readers_may_reach_kv_event_ports() -> None:
    of_clients, of_events, among_instances = policies("full.yaml")["mooncake-engine"]
    assert [rule["port"] for rule in of_events["ports"]] == [5557, 5558]
    proxy, _, gateways = of_clients["from"]
    assert of_events["from"] == [proxy, gateways], "but not all namespaces that may ask instances"
    assert "ports" not in among_instances


def test_both_autoscalers_have_same_scale_down_delay() -> None:
    folder = DEPLOY / "autoscaling"
    waits = [o["spec"]["behavior"] for o in read_yaml(folder / "pod-autoscalers.yaml")]
    for scaled in read_yaml(folder / "keda-scaled-objects.yaml"):
        advanced = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
        assert advanced["behavior"] == waits[0]
    assert waits[0]["scaleDown"]["stabilizationWindowSeconds"] == 600
