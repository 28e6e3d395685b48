"""Tests vLLM's MultiConnector with our connectors in both orders, and with one of vLLM's own.

vLLM's OffloadingConnector is not available on CPUs; its ExampleConnector, which keeps KV in files
and loads it within a step, is used instead.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from vllm_environment import CACHE, DidNotStart
from vllm_pool_check import CHUNK, pool_config, until_saved
from vllm_requests import figure, post, token_ids, until_zero
from vllm_serving import (
    Json,
    cores,
    free_port,
    proxying,
    serving,
    transfer_config,
)

FILES = CACHE / "vllm-example-connector"
LOADS = "vllm:mooncake_hal_loads_total"
POOL_LOADS = "vllm:mooncake_hal_pool_num_loads_total"
EXTERNAL = "vllm:external_prefix_cache_hits_total"
ORDERS = (
    ("pull", "pool"),
    ("pool", "pull"),
    ("pull", "example"),
    ("push", "pool"),
    ("pool", "push"),
)
SAVING = "vllm:mooncake_hal_pool_saves_in_flight"
NOTHING_LEFT = ("vllm:kv_cache_usage_perc", "vllm:mooncake_hal_leases_held", SAVING)
NO_ERRORS = (
    "vllm:mooncake_hal_hook_errors_total",
    "vllm:mooncake_hal_pool_hook_errors_total",
    "vllm:mooncake_hal_load_failures_total",
)


def check_multi(
    python: Path, cases: dict[str, tuple[str, Json]], wanted: dict[str, Json], timeout_s: float
) -> list[str]:
    """Test every order; returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        cases: path and body of requests by name; their prompts have at least one chunk and share no
            prefix.
        wanted: a single vLLM's answer to each.
        timeout_s: seconds for an instance to start.
    """
    problems = []
    for order in ORDERS:
        try:
            problems += check_order(python, order, cases, wanted, timeout_s)
        except DidNotStart as exc:
            problems.append(f"multi {order}: {exc}")
    return problems


def check_order(
    python: Path,
    order: tuple[str, ...],
    cases: dict[str, tuple[str, Json]],
    wanted: dict[str, Json],
    timeout_s: float,
) -> list[str]:
    """Test P and D with the same child connectors: half of the prompts are transferred from P to D,
    the others are loaded from where the other child saved them."""
    port = free_port()
    shutil.rmtree(FILES, ignore_errors=True)
    FILES.mkdir()
    pools = {
        "kv_producer": f"dram=256MiB,port={port},chunk={CHUNK}",
        "kv_consumer": f"connect=127.0.0.1:{port},chunk={CHUNK}",
    }
    name, problems = f"multi {'+'.join(order)}", []
    with ExitStack() as stack:
        urls = []
        for number, (role, pool) in enumerate(pools.items()):
            log = CACHE / f"vllm-multi-{role}.log"
            transfer = multi_config(order, role, pool)
            vllm = stack.enter_context(serving(python, transfer, cores(number), log))
            vllm.wait_until_healthy(timeout_s)  # the store must be ready before its clients
            urls.append(vllm.url)
        prefill, decode = urls
        flow = "push" if "push" in order else "pull"
        proxy = stack.enter_context(proxying(prefill, decode, flow))
        for number, (case, (path, body)) in enumerate(cases.items()):
            by_transfer = number % 2 == 0
            url, extra = decode, {}
            if by_transfer and flow == "push":  # D is asked while P computes
                url = proxy
            else:
                extra = computed(prefill, path, body, for_decode=by_transfer)
                if "pool" in order:  # P saves after it has answered
                    until_saved(prefill, number + 1)
            found = token_ids(post(url, path, body | extra))
            if url is proxy and "pool" in order:
                until_saved(prefill, number + 1)
            same = found == token_ids(wanted[case])
            how = ("pushed" if flow == "push" else "pulled") if by_transfer else "kept"
            what = f"{'+'.join(order)}: {case}, {how}"
            print(f"multi         {what:34} {'ok' if same else 'WRONG'}", flush=True)
            if not same or (url is decode and by_transfer and not extra):
                problems.append(f"{name}: {case}: {found!r:.200}, parameters {extra!r:.80}")
        problems += [f"{name}: {problem}" for problem in look(order, prefill, decode, len(cases))]
    return problems


def computed(prefill: str, path: str, body: Json, *, for_decode: bool) -> Json:
    """Have P compute a prompt; returns the fields for D's request, if its KV is to be
    transferred."""
    asks = {"kv_transfer_params": {"do_remote_decode": True}} if for_decode else {}
    params = post(prefill, path, body | {"max_tokens": 1} | asks).get("kv_transfer_params")
    return {"kv_transfer_params": params} if for_decode and params else {}


def multi_config(order: tuple[str, ...], role: str, pool: str, **settings: object) -> Json:
    """``--kv-transfer-config`` of an instance; ``settings`` apply to the child that transfers
    KV."""
    both = {
        flow: transfer_config(role, flow, ["shm", "tcp"], **settings) for flow in ("pull", "push")
    }
    children: dict[str, Json] = {
        **both,
        "pool": pool_config(pool),
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(FILES)},
        },
    }
    chosen = {"connectors": [children[child] for child in order]}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": chosen,
    }


def look(order: tuple[str, ...], prefill: str, decode: str, num_cases: int) -> list[str]:
    """Check the sources of loads, and that nothing is left over; returns the problems."""
    pulled, pooled = figure(decode, LOADS), figure(decode, POOL_LOADS)
    hits = figure(decode, EXTERNAL)
    print(
        f"multi         {pulled:g} handed over, {pooled:g} from the pool, {hits:g} tokens",
        flush=True,
    )
    half = (num_cases + 1) // 2
    problems = []
    if order != ("pool", "pull") and pulled != half:
        problems.append(f"{pulled:g} prompts were handed over, wanted {half}")
    if "pool" in order and pooled < num_cases - half:
        problems.append(f"{pooled:g} prompts came from the pool, wanted {num_cases - half}")
    if order == ("pool", "pull") and pooled != num_cases:
        problems.append(f"{pooled:g} prompts came from the pool, wanted {num_cases}")
    if hits < num_cases * CHUNK:
        problems.append(f"{hits:g} tokens came from elsewhere, wanted {num_cases * CHUNK} and more")
    for who, url in (("P", prefill), ("D", decode)):
        problems += [
            f"{who} has {each} {left:g}" for each in NOTHING_LEFT if (left := until_zero(url, each))
        ]
        problems += [f"{who} has {each} {n:g}" for each in NO_ERRORS if (n := figure(url, each))]
    return problems
