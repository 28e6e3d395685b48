"""Prometheus and Grafana in the compose deployment: mounted files and scrape targets exist."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.deploy import DEPLOY, compose, compose_commands, parse, read_yaml

MONITORING = DEPLOY / "monitoring"
[ADDED] = read_yaml(DEPLOY / "docker" / "compose.monitoring.yaml")
SERVICES: dict[str, dict[str, Any]] = ADDED["services"]


def mounts(service: str) -> dict[str, str]:
    """The host file mounted at each path of a container."""
    binds = [volume for volume in SERVICES[service]["volumes"] if isinstance(volume, dict)]
    return {volume["target"]: volume["source"] for volume in binds}


def test_monitoring_only_adds_to_the_deployment() -> None:
    assert ADDED["name"] == compose()["name"]
    assert not SERVICES.keys() & compose()["services"].keys()
    for service in SERVICES.values():
        assert service["networks"] == list(compose()["networks"])
        [published] = service["ports"]
        assert published.startswith("127.0.0.1:")


@pytest.mark.parametrize("service", SERVICES)
def test_mounted_files_exist_and_are_read_only(service: str) -> None:
    for source in mounts(service).values():
        assert (DEPLOY / "docker" / source).resolve().is_file()
    for volume in SERVICES[service]["volumes"]:
        assert isinstance(volume, str) or volume["read_only"] is True
        assert not isinstance(volume, str) or volume.split(":")[0] in ADDED["volumes"]


def test_every_process_is_scraped_at_its_port() -> None:
    [config] = read_yaml(MONITORING / "prometheus.yaml")
    jobs = config["scrape_configs"]
    groups = [group for job in jobs for group in job.get("static_configs", [])]
    scraped = {target: group.get("labels") for group in groups for target in group["targets"]}
    listening = {f"{name}:{parse(line).port}" for name, line in compose_commands().items()}
    assert scraped.keys() == listening
    for target, labels in scraped.items():
        role = target.split("-")[0]
        assert labels == ({"role": role} if "-" in target else None)


def test_store_is_scraped_if_it_runs() -> None:
    """By its name: while it has none, Prometheus has no target that is down."""
    [config] = read_yaml(MONITORING / "prometheus.yaml")
    [job] = [job for job in config["scrape_configs"] if "dns_sd_configs" in job]
    port = parse(compose_commands("compose.store.yaml")["store"]).metrics_port
    assert job["dns_sd_configs"] == [{"names": ["store"], "type": "A", "port": port}]


def test_prometheus_reads_mounted_files() -> None:
    [config] = read_yaml(MONITORING / "prometheus.yaml")
    [argument] = [a for a in SERVICES["prometheus"]["command"] if a.startswith("--config.file=")]
    where = argument.split("=")[1]
    found = mounts("prometheus")
    assert found[where] == "../monitoring/prometheus.yaml"
    for name in config["rule_files"]:
        assert found[where.rpartition("/")[0] + f"/{name}"] == f"../monitoring/{name}"


def test_grafana_provisions_prometheus_and_dashboard() -> None:
    [source] = read_yaml(MONITORING / "grafana-datasource.yaml")[0]["datasources"]
    url = urlsplit(source["url"])
    assert url.hostname in SERVICES
    assert SERVICES[str(url.hostname)]["ports"] == [f"127.0.0.1:{url.port}:{url.port}"]
    assert source["isDefault"] is True  # the dashboard's panels name no data source
    [provider] = read_yaml(MONITORING / "grafana-provider.yaml")[0]["providers"]
    [path] = [target for target in mounts("grafana") if target.endswith(".json")]
    assert path.startswith(provider["options"]["path"] + "/")
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == path
    dashboard = json.loads((DEPLOY / "docker" / mounts("grafana")[path]).resolve().read_text())
    kinds = {variable["query"] for variable in dashboard["templating"]["list"]}
    assert kinds == {source["type"]}
