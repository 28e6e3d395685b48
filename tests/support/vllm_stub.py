"""The few names of vLLM that the connector imports, for tests of code around them.

They have the interfaces that ``tests/contract/vllm`` records, but none of vLLM's behaviour.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
EVENTS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("block_hashes", "medium"),
}


class KVConnectorBase_V1:  # vLLM's name
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._role = vllm_config, role
        self._kv_cache_config = kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self._connector_metadata


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class KVConnectorMetadata:
    pass


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, config: Any, types: Any, labelnames: Any, values: Any) -> None:
        self.per_engine_labelvalues = values


class Role:
    SCHEDULER, WORKER = 0, 1


class Factory:
    registered: dict[str, tuple[str, str]] = {}  # noqa: RUF012  # one per test: see install

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        cls.registered[name] = module_path, class_name


def install(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Make these importable as a vLLM that runs on such a device, for one test."""
    Factory.registered = {}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type=device)},
        "vllm.distributed": {"get_pp_group": None, "get_tp_group": None},
        "vllm.distributed.kv_events": {
            name: make_dataclass(name, [(each, Any, None) for each in fields])
            for name, fields in EVENTS.items()
        },
        f"{CONNECTOR}.factory": {"KVConnectorFactory": Factory},
        f"{CONNECTOR}.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase_V1,
            "KVConnectorMetadata": KVConnectorMetadata,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": KVConnectorTransferResults,
            "SupportsHMA": SupportsHMA,
        },
        f"{CONNECTOR}.v1.metrics": {
            "KVConnectorPromMetrics": KVConnectorPromMetrics,
            "KVConnectorStats": KVConnectorStats,
        },
        "prometheus_client": {"Counter": "counter", "Gauge": "gauge"},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm_connectors", "transfer_stats"):
        monkeypatch.delitem(sys.modules, f"mooncake_vllm.{name}", raising=False)
