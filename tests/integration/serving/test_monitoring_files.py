"""Every metric in the dashboard and the alert rules exists in a live scrape."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.programs import TINY_LLAMA, running

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((MONITORING / "alert-rules.yaml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{f"alert {rule['alert']}": rule["expr"] for rule in RULES},
    **{
        f"panel {panel['title']} {target['refId']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
}
OF_VLLM = "vllm:mooncake_hal_"
"""Our connectors inside vLLM, which does not run here: tests/unit/vllm/test_transfer_stats.py."""
_METRIC = re.compile(r"\b(?:vllm|mooncake)[:_][a-z_]+\b")
_LABELS = re.compile(r"by \(([^)]*)\)")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as response:
        return str(response.read().decode())


@pytest.fixture(scope="module")
def scraped() -> dict[str, set[str]]:
    """The labels of every sample of a proxy, its instances and their store, by metric name."""
    options = ("--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "256")
    options += ("--kv-pool", "dram=16MiB,chunk=16")
    with running("mooncake_engine.cli", "up", *options) as program:
        url = re.split("/v1", program.wait_for("curl -N http://127.0.0.1:").split()[2])[0]
        program.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
        of_proxy = fetch(f"{url}/metrics")
        instances = sorted(set(re.findall(r"127\.0\.0\.1:\d+", of_proxy)))
        texts = [of_proxy, *(fetch(f"http://{address}/metrics") for address in instances)]
        [store] = re.findall(r"metrics are at (http://\S+)", program.error_text)
        texts.append(fetch(store))
        program.close()
    assert len(texts) == 4
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            # Families without samples yet, such as errors by reason, are declared nevertheless.
            suffix = {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
            found.setdefault(f"{family.name}{suffix}", set())
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_every_metric_exists(expression: str, scraped: dict[str, set[str]]) -> None:
    names = _METRIC.findall(expression)
    assert names
    for name in names:
        if name.startswith(OF_VLLM):
            continue
        assert name in scraped, name
        labels = {
            label.strip() for group in _LABELS.findall(expression) for label in group.split(",")
        }
        # Prometheus itself adds the label of the scraped instance.
        unknown = labels - scraped[name] - {"instance", ""}
        assert not unknown or not scraped[name], (name, unknown)


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_have_instructions() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        described: dict[str, Any] = rule["annotations"]
        assert described["summary"], rule
        assert described["description"], rule
        assert rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-here.yaml"])
def test_instance_label_of_proxy_metrics_is_kept(name: str) -> None:
    jobs = yaml.safe_load((MONITORING / name).read_text())["scrape_configs"]
    [proxy] = [job for job in jobs if job["job_name"] == "mooncake-proxy"]
    assert proxy["honor_labels"] is True
