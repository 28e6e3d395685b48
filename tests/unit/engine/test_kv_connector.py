"""The engine's side of the KV connector: errors, loading connector classes, push steps."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

from mooncake_engine.config import EngineConfig
from mooncake_engine.errors import ConfigError, EngineError, InvalidRequest, PortInUse
from mooncake_engine.execution.worker_extension import ExtensionContext
from mooncake_engine.kv_connector import ConnectorExtension, engine_errors, find_connector
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence, StepPlan
from mooncake_kv.connector_worker import PushStep
from mooncake_kv.errors import InvalidKVParams, KVConfigError, SideChannelPortInUse


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (SideChannelPortInUse("port 1"), PortInUse),
        (KVConfigError("no such host"), ConfigError),
        (InvalidKVParams("kv_transfer_params: no"), InvalidRequest),
    ],
)
def test_connector_errors_become_engine_errors(raised: Exception, error: type[EngineError]) -> None:
    with pytest.raises(error) as found, engine_errors():
        raise raised
    assert type(found.value) is error
    assert str(found.value) == str(raised)
    assert found.value.__cause__ is raised
    if isinstance(found.value, InvalidRequest):
        assert (found.value.param, found.value.status) == ("kv_transfer_params", 400)


def test_unknown_connector_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'Nothing' is not known; known are .*MooncakeConnector"):
        find_connector("Nothing")


class HalfAConnector:
    """A class that lacks ``start``, ``mode`` and ``on_rank_message``."""

    worker = object


def test_connector_is_found_by_module_and_class() -> None:
    found = find_connector("mooncake_kv.pull_connector:MooncakeConnector")
    assert found is find_connector("MooncakeConnector")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no.such.module:Class", "can't be loaded from no.such.module:Class: No module named 'no'"),
        ("json:Nothing", "module 'json' has no attribute 'Nothing'"),
        ("json:loads", "is not a connector: wanted a class .* lacks mode, worker, on_rank_message"),
        (f"{__name__}:HalfAConnector", "lacks mode, on_rank_message, start"),
        ("json:", "can't be loaded|is not a connector"),
        (":Class", "can't be loaded"),
    ],
)
def test_invalid_connector_class_is_rejected(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    with pytest.raises(ConfigError, match=words):
        find_connector(name)


def _this_module() -> ModuleType:
    module = ModuleType(__name__)
    module.HalfAConnector = HalfAConnector  # type: ignore[attr-defined]
    return module


def test_connector_extension_needs_a_kv_transfer_config() -> None:
    context = cast(Any, ExtensionContext)(
        0, 1, 0, None, None, None, EngineConfig(Path("m")), None, None
    )
    with pytest.raises(ConfigError, match="ConnectorExtension needs a kv_transfer configuration"):
        ConnectorExtension(context)


def push_steps(*plans: StepPlan) -> list[list[PushStep]]:
    extension: Any = ConnectorExtension.__new__(ConnectorExtension)
    extension._sending, extension._restarts = set(), {}
    return [extension._push_steps(plan) for plan in plans]


def new(name: str, *, sends_kv: bool) -> NewRequest:
    return NewRequest(name, (1, 2, 3), 3, SamplingParams(), 0, (7,), sends_kv)


def test_push_steps_cover_only_requests_that_send_kv() -> None:
    first = (ScheduledSequence("a", 0, 2), ScheduledSequence("b", 0, 2))
    second = (ScheduledSequence("a", 2, 1, (8,)), ScheduledSequence("b", 2, 1))
    found = push_steps(
        StepPlan(0, (), (new("a", sends_kv=True), new("b", sends_kv=False)), sequences=first),
        StepPlan(1, sequences=second),
        StepPlan(2, ("a",), sequences=second[1:]),
    )
    assert found == [[PushStep("a", 2, (), (7,))], [PushStep("a", 3, (8,))], []]


def test_restarted_request_marks_its_push_step() -> None:
    begin = StepPlan(0, (), (new("a", sends_kv=True),), sequences=(ScheduledSequence("a", 0, 2),))
    again = StepPlan(1, (), (new("a", sends_kv=True),), sequences=(ScheduledSequence("a", 0, 3),))
    assert [steps[0].restart for steps in push_steps(begin, again)] == [(7,), (7,)]
