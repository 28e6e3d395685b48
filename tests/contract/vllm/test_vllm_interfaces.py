"""Our connector against every supported release of vLLM, by the interface files in this folder.

Neither vLLM nor torch is needed: both sides are parsed as text. ci/vllm_interfaces.py writes the
files from vLLM's source distributions, and fails if one of them is out of date. A hook that a new
release adds fails here until it is overridden or listed below.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncake_vllm
from mooncake_vllm import vllm_plugin
from mooncake_vllm.vllm_interface import HIT_SOURCES

RELEASES = {
    path.stem: json.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.json"))
}
NEWEST = max(RELEASES, key=lambda name: [int(part) for part in name.split(".")])
FOLDER = Path(mooncake_vllm.__file__).parent
CONNECTORS = ast.parse((FOLDER / "vllm_connectors.py").read_text())
STATS = ast.parse((FOLDER / "transfer_stats.py").read_text())
INSTANCE = ast.parse((FOLDER / "vllm_instance.py").read_text())
PAGES = ast.parse((FOLDER / "vllm_pages.py").read_text())
SCHEDULER_SIDE = (FOLDER / "vllm_scheduler_side.py").read_text()
INTERFACE = ast.parse((FOLDER / "vllm_interface.py").read_text())

NOT_OVERRIDDEN = {
    "role": "the base's",
    "clear_connector_metadata": "the base's",
    "has_connector_metadata": "the base's",
    "get_finished": "get_transfer_results replaces it, which can say that a load failed",
    "get_block_ids_with_load_errors": "failed loads are named by request, drained",
    "get_handshake_metadata": "ranks are met by socket: MultiConnector mixes metadata up",
    "set_xfer_handshake_metadata": "as above",
    "set_xfer_handshake_metadata_pp_aware": "as above",
    "build_connector_worker_meta": "what a rank has to say goes by socket",
    "update_connector_output": "as above",
    "handle_preemptions": "a preempted request has no load in flight",
    "finish_forward": "loads wait for their blocks' step, not for its end",
    "reset_capture_state": "nothing is captured",
    "set_host_xfer_buffer_ops": "KV is moved from and to the device's own memory",
    "get_mem_pool_context": "KV lies where vLLM puts it",
    "unregister_kv_caches": "sleep mode is refused",
    "restore_kv_caches": "as above",
    "bind_kv_cache_manager": "blocks are held by reports only",
    "get_finished_count": "every worker reports",
    "has_pending_block_frees": "leases end by themselves, soon",
    "requires_kv_delivery": "the role decides, as the base has it; never true of the pool's",
    "requires_piecewise_for_cudagraph": "what no layer's hook names is sent after the step",
    "register_finished_partial_tail": "for stores",
    "supports_divergent_local_hybrid_hits": "recurrent states are refused",
    "get_kv_connector_kv_cache_events": "stores tell the scheduler's side: take_events",
}
"""Hooks of the base class that we don't override, with reasons."""

READ = {
    "transfer": "KVTransferConfig",
    "transfer_of_vllm": "KVTransferConfig",
    "kv_transfer_config": "KVTransferConfig",
    "parallel": "ParallelConfig",
    "parallel_config": "ParallelConfig",
    "model_config": "ModelConfig",
    "load_config": "LoadConfig",
    "vllm_config": "VllmConfig",
    "_vllm_config": "VllmConfig",
    "kv_cache_config": "KVCacheConfig",
    "_kv_cache_config": "KVCacheConfig",
    "compilation_config": "CompilationConfig",
    "group": "KVCacheGroupSpec",
    "spec": "AttentionSpec",
    "sliding": "SlidingWindowSpec",
    "layer": "AttentionLayerBase",
    "backend": "AttentionBackend",
    "stage": "GroupCoordinator",
    "ranks": "GroupCoordinator",
    "platform_of_vllm": "Platform",
    "published": "KVEventsConfig",
}
"""Names of objects of vLLM in our modules, and their classes."""

release = pytest.mark.parametrize("facts", RELEASES.values(), ids=list(RELEASES))


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def functions(owner: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}


CONNECTOR = functions(classes(CONNECTORS)["HalConnector"])


def accepts(ours: ast.FunctionDef, count: int, keywords: list[str]) -> bool:
    """Whether a call with ``count`` positional arguments and these keyword arguments would bind."""
    names = [each.arg for each in ours.args.args][1:]
    required = names[: len(names) - len(ours.args.defaults)]
    by_keyword = {*names[count:], *(each.arg for each in ours.args.kwonlyargs)}
    is_filled = all(name in keywords for name in required[count:])
    is_known = ours.args.kwarg is not None or by_keyword.issuperset(keywords)
    return count <= len(names) and is_filled and is_known


def test_releases_equal_those_in_the_plugin() -> None:
    minors = sorted(tuple(int(part) for part in name.split(".")[:2]) for name in RELEASES)
    assert (minors[0], minors[-1]) == (vllm_plugin.OLDEST, vllm_plugin.NEWEST)


@release
def test_every_hook_is_overridden_or_listed_with_a_reason(facts: dict[str, Any]) -> None:
    members = facts["members"]["KVConnectorBase_V1"]
    hooks = {name for name in members if not name.startswith("_")}
    assert hooks - {*CONNECTOR} - {*NOT_OVERRIDDEN} == set()


def test_listed_hooks_exist() -> None:
    of_base, of_groups = (
        RELEASES[NEWEST]["members"][name] for name in ("KVConnectorBase_V1", "SupportsHMA")
    )
    members = {*of_base, *of_groups}
    assert {*NOT_OVERRIDDEN} - members == set()
    assert {*NOT_OVERRIDDEN} & {*CONNECTOR} == set()
    ours = {name for name in CONNECTOR if not name.startswith("_")}
    assert ours - members == {
        "on_kv_cache_written"
    }  # vLLM-Ascend's: see tests/contract/vllm_ascend


@release
def test_abstract_methods_are_implemented(facts: dict[str, Any]) -> None:
    methods = facts["methods"]["KVConnectorBase_V1"] | facts["methods"]["SupportsHMA"]
    assert {name for name, each in methods.items() if each["abstract"]} <= {*CONNECTOR}


@release
@pytest.mark.parametrize(
    ("base", "tree", "name", "num_shared"),
    [
        ("KVConnectorBase_V1", CONNECTORS, "HalConnector", 2),
        ("SupportsHMA", CONNECTORS, "HalConnector", 1),
        ("KVConnectorStats", STATS, "HalStats", 2),
        ("KVConnectorPromMetrics", STATS, "HalPromMetrics", 2),
    ],
)
def test_overrides_accept_the_parameters_of_the_base(
    facts: dict[str, Any], base: str, tree: ast.Module, name: str, num_shared: int
) -> None:
    ours = functions(classes(tree)[name])
    shared = {*facts["methods"][base]} & {*ours}
    assert len(shared) >= num_shared
    for method in shared:
        theirs, own = facts["methods"][base][method], ours[method]
        parameters = theirs["parameters"]
        assert accepts(own, len(parameters), theirs["keywords"]), method
        assert accepts(own, 0, parameters + theirs["keywords"]), method
        least = len(parameters) - theirs["num_optional"]
        assert accepts(own, least, []), method
        assert not theirs["takes_any_keyword"] or own.args.kwarg is not None, method


@release
def test_vllms_own_calls_bind(facts: dict[str, Any]) -> None:
    found = [call for call in facts["calls"].values() if call[0] in CONNECTOR]
    assert len(found) >= 12
    for name, count, keywords in found:
        assert accepts(CONNECTOR[name], count, keywords), name


@release
def test_attributes_read_from_requests_and_blocks_exist(facts: dict[str, Any]) -> None:
    for owner in classes(INTERFACE).values():
        [name] = re.findall(r"``vllm\.[\w.]*\.(\w+)``", ast.get_docstring(owner) or "")
        wanted = {
            node.target.id if isinstance(node, ast.AnnAssign) else node.name  # type: ignore[union-attr]
            for node in owner.body
            if isinstance(node, ast.AnnAssign | ast.FunctionDef)
        } - {"name"}  # of every enum
        assert wanted or name == "RequestStatus"
        assert wanted - {*facts["members"][name]} == set(), name
    assert {"FINISHED_LENGTH_CAPPED", "FINISHED_ERROR"} <= {*facts["members"]["RequestStatus"]}
    assert facts["methods"]["KVCacheBlocks"]["get_block_ids"]["num_optional"] == len(
        facts["methods"]["KVCacheBlocks"]["get_block_ids"]["parameters"]
    )


@release
def test_sources_of_hits_are_members_of_vllms_enum(facts: dict[str, Any]) -> None:
    known = facts["members"].get("CacheHitSource")
    hooks = {"_cache_hit_source", "get_external_cache_hit_sources"}
    found = hooks & {*facts["members"]["KVConnectorBase_V1"]}
    assert found == (set() if known is None else hooks)
    assert known is None or {*HIT_SOURCES} <= {*known}


@release
def test_blocks_are_referenced_and_freed_as_declared(facts: dict[str, Any]) -> None:
    for name, ours in functions(classes(INTERFACE)["BlockPool"]).items():
        if name not in ("touch", "free_blocks"):
            continue
        theirs = facts["methods"]["BlockPool"][name]
        assert theirs["parameters"] == [each.arg for each in ours.args.args[1:]], name
        assert theirs["num_optional"] == len(theirs["keywords"]) == 0, name


@release
def test_cache_reset_replaces_the_watched_attribute(facts: dict[str, Any]) -> None:
    assert "cached_block_hash_to_block" in functions(classes(INTERFACE)["BlockPool"])
    assert "cached_block_hash_to_block" in facts["resets"]["BlockPool.reset_prefix_cache"]


@release
def test_choices_are_told_apart_by_their_ids(facts: dict[str, Any]) -> None:
    assert "f'{index}_{self.request_id}'" in facts["bodies"]["get_child_info"]
    [pattern] = re.findall(r'LATER_CHOICE = re.compile\(r"(.*)"\)', SCHEDULER_SIDE)
    matched = [bool(re.match(pattern, f"{index}_cmpl-r")) for index in (0, 1, 10)]
    assert matched == [False, True, True]


@release
def test_connector_gets_params_of_a_request_for_an_unknown_model(facts: dict[str, Any]) -> None:
    """The proxy releases leases by such a request."""
    bodies = facts["bodies"]
    assert "self._with_kv_transfer_rejection_cleanup" in bodies["create_completion"]
    assert "self._check_model" in bodies["render_completion_request"]
    notify = "self.engine_client.notify_kv_transfer_request_rejected"
    assert notify in bodies["_with_kv_transfer_rejection_cleanup"]


@release
def test_connectors_of_workers_can_read_vllms_own_configuration(facts: dict[str, Any]) -> None:
    """A child of MultiConnector is given another one, with its own ``kv_role``."""
    bodies = facts["bodies"]["initialize_from_config"]
    assert {"set_current_vllm_config", "self.worker.initialize_from_config"} <= {*bodies}


@release
def test_events_accept_our_fields(facts: dict[str, Any]) -> None:
    [made] = [ast.unparse(n) for n in CONNECTORS.body if getattr(n, "name", "") == "_as_vllm_event"]
    for name in ("BlockStored", "BlockRemoved"):
        arguments = re.search(rf"Vllm{name}\((.*)\)$", made, re.MULTILINE)
        assert arguments is not None
        given = {*re.findall(r"(\w+)=", arguments[1])}
        assert given <= {*facts["members"][name]}, name


def read_attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(class, attribute) of every attribute read on an object in READ."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        value = node.value
        name = (
            value.id
            if isinstance(value, ast.Name)
            else (value.attr if isinstance(value, ast.Attribute) else "")
        )
        if name in READ and not node.attr.startswith("__"):  # attributes that every class has
            yield READ[name], node.attr


def members_with_bases(facts: dict[str, Any], name: str) -> set[str]:
    found = {*facts["members"].get(name, ())}
    for base in facts["bases"].get(name, ()):
        found |= members_with_bases(facts, base)
    return found


@release
def test_attributes_read_from_the_configuration_exist(facts: dict[str, Any]) -> None:
    reads = {pair for tree in (INSTANCE, PAGES, CONNECTORS) for pair in read_attributes(tree)}
    assert len(reads) >= 20
    assert {
        (owner, name) for owner, name in reads if name not in members_with_bases(facts, owner)
    } == set()


@release
def test_cache_specs_have_the_checked_attributes(facts: dict[str, Any]) -> None:
    checked = {
        node.value
        for function in ast.walk(INSTANCE)
        if isinstance(function, ast.FunctionDef) and function.name == "_spec_problems"
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "_" in node.value
    }
    assert {"kv_quant_mode", "page_size_padded"} <= checked
    for kind in ("FullAttentionSpec", "MLAAttentionSpec"):
        assert checked <= members_with_bases(facts, kind)


@release
def test_layouts_are_vllms(facts: dict[str, Any]) -> None:
    from mooncake_vllm.vllm_settings import LAYOUTS

    assert {*LAYOUTS} <= {*facts["members"]["KVCacheLayout"]}


@release
def test_imported_names_exist(facts: dict[str, Any]) -> None:
    for tree in (CONNECTORS, STATS, INSTANCE, ast.parse((FOLDER / "vllm_plugin.py").read_text())):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vllm"):
                continue
            package = (node.module or "").removeprefix("vllm").removeprefix(".")
            known = {*facts["names"].get(package, ()), *facts["members"]}
            beside = {"KVConnectorMetadata", "KVConnectorRole"}  # in the module of the base class
            assert {each.name for each in node.names} <= known | beside, node.module
    assert "register_connector" in facts["methods"]["KVConnectorFactory"]
    assert facts["methods"]["KVConnectorFactory"]["register_connector"]["parameters"] == [
        "name",
        "module_path",
        "class_name",
    ]
