"""Tests P on vLLM with D on our own engine, and vice versa, behind our proxy.

vLLM's own CPU attention packs K in a format that only it can read: the handshake of such a pair is
rejected with the names of both formats, and D computes the prompt. With an attention backend whose
KV is linear, as on GPUs, KV is transferred in both directions, and each side loads what the other
one saved to the KVCache pool. Latents are transferred too, and the reader reorders their rotated
part; the pool does not share them between the two engines.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

from vllm_environment import CACHE, ROOT, DidNotStart
from vllm_multi_check import multi_config
from vllm_pairs import LATENT, MODELS, answers_alone, folder_of
from vllm_pool_check import CHUNK, LOADED, SAVED, pool_config, until_saved
from vllm_requests import COMPLETIONS, NUM_TOKENS, ask, figure, post, without_token_ids
from vllm_serving import (
    Json,
    cores,
    free_port,
    proxying,
    serving,
    start_engine,
    stop,
    transfer_config,
    wait_until_healthy,
)

TRANSPORTS = ["shm", "tcp"]
PLUGIN = CACHE / "vllm-linear-attention"
INSTALL = "import sys; from pathlib import Path; import support.vllm_linear_attention as plugin; "
OUR_LOADS = "mooncake:kv_transfer_loads_total"
OUR_FAILURES = "mooncake:kv_transfer_load_failures_total"
OUR_LOADED = "mooncake:kv_pool_num_loaded_chunks_total"
OUR_SAVED = "mooncake:kv_pool_num_saved_chunks_total"
OUR_REFUSALS = "mooncake:kv_transfer_refused_loads_total"
THEIR_LOADS = "vllm:mooncake_hal_loads_total"
THEIR_FAILURES = "vllm:mooncake_hal_load_failures_total"


def check_mixed(
    python: Path,
    cases: dict[str, tuple[str, Json]],
    wanted: dict[str, Json],
    timeout_s: float,
) -> list[str]:
    """Test both directions with linear KV, a pool, then rejected pairs; returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        cases: path and body of requests by name; their prompts share no prefix.
        wanted: a single vLLM's answer to each.
        timeout_s: seconds for an instance to start.
    """
    asked = {name: (path, without_token_ids(body)) for name, (path, body) in cases.items()}
    try:
        latent = answers_alone(python, timeout_s, asked, LATENT)
        of_heads, of_latents = (
            {name: answers[name]["choices"][0]["text"] for name in cases}
            for answers in (wanted, latent)
        )
        checks = dict.fromkeys((both_ways, pooled, packed), of_heads)
        checks |= dict.fromkeys((latents, pushed_latents), of_latents)
        return [
            problem
            for check, texts in checks.items()
            for problem in check(python, asked, texts, timeout_s)
        ]
    except DidNotStart as exc:
        return [f"mixed: {exc}"]


def both_ways(
    python: Path, asked: dict[str, tuple[str, Json]], texts: dict[str, str], timeout_s: float
) -> list[str]:
    """Test vLLM with linear KV as P and as D of our own engine."""
    log = CACHE / "vllm-mixed-linear.log"
    transfer = transfer_config("kv_both", "pull", TRANSPORTS)
    with ExitStack() as stack:
        running = stack.enter_context(
            serving(python, transfer, cores(0), log, **linear_attention(python))
        )
        prefill, decode = (engine(stack, role, timeout_s) for role in ("prefill", "decode"))
        running.wait_until_healthy(timeout_s)
        return hand_over(running.url, prefill, decode, asked, texts)


def hand_over(
    vllm: str,
    prefill: str,
    decode: str,
    asked: dict[str, tuple[str, Json]],
    texts: dict[str, str],
    flow: str = "pull",
) -> list[str]:
    """Test vLLM as P and as D with two of our instances; returns the problems."""
    problems = []
    with proxying(vllm, decode, flow, emits_first_token=False) as proxy:
        problems += compare("from vLLM", proxy, asked, texts)
        problems += compare_several("from vLLM", proxy, asked, texts)
        problems += count(decode, OUR_LOADS, OUR_FAILURES, len(asked))
    with proxying(prefill, vllm, flow) as proxy:
        # vLLM has cached what it computed as P; a cache salt makes it load KV as D.
        salted = {
            name: (path, body | {"cache_salt": "to vLLM"}) for name, (path, body) in asked.items()
        }
        problems += compare("to vLLM", proxy, salted, texts)
        problems += compare_several("to vLLM", proxy, salted, texts)
        problems += count(vllm, THEIR_LOADS, THEIR_FAILURES, len(asked))
    if errors := figure(vllm, "vllm:mooncake_hal_hook_errors_total"):
        problems.append(f"mixed: {errors:g} hooks have failed")
    return problems


def pooled(
    python: Path, asked: dict[str, tuple[str, Json]], texts: dict[str, str], timeout_s: float
) -> list[str]:
    """Test a store in our own engine: each side answers with KV that the other one saved."""
    log, port = CACHE / "vllm-mixed-pool.log", free_port()
    transfer = pool_config(f"connect=127.0.0.1:{port},chunk={CHUNK}")
    with ExitStack() as stack:
        # Without load=always, recomputing such a small model would be chosen as faster.
        pool = f"dram=256MiB,port={port},chunk={CHUNK},load=always"
        ours = engine(stack, "both", timeout_s, "--kv-pool", pool)
        running = stack.enter_context(
            serving(python, transfer, cores(0), log, **linear_attention(python))
        )
        running.wait_until_healthy(timeout_s)
        vllm = running.url
        problems, saved, whole = [], {ours: 0, vllm: 0}, {ours: 0, vllm: 0}
        turns = [("from vLLM", vllm, SAVED, ours), ("to vLLM", ours, OUR_SAVED, vllm)]
        for number, (name, (path, body)) in enumerate(asked.items()):
            way, saver, counter, loader = turns[number % 2]
            case = {f"{name}, by the pool": (path, body)}
            text = {f"{name}, by the pool": texts[name]}
            problems += compare(f"{way}: computed", saver, case, text)
            saved[saver] += (len(body["prompt"]) + NUM_TOKENS - 1) // CHUNK
            until_saved(saver, saved[saver], counter)
            problems += compare(f"{way}: loaded", loader, case, text)
            whole[loader] += (len(body["prompt"]) - 1) // CHUNK
        loaded = {ours: figure(ours, OUR_LOADED), vllm: figure(vllm, LOADED)}
        print(f"mixed         chunks loaded: {list(loaded.values())}", flush=True)
        if loaded != whole:
            problems.append(f"mixed: {loaded} chunks came from the pool, wanted {whole}")
    return problems


def packed(
    python: Path, asked: dict[str, tuple[str, Json]], texts: dict[str, str], timeout_s: float
) -> list[str]:
    """Test vLLM's own CPU attention as P of our engine: rejected, with both formats' names."""
    log = CACHE / "vllm-mixed-packed.log"
    transfer = transfer_config("kv_producer", "pull", TRANSPORTS)
    with ExitStack() as stack:
        running = stack.enter_context(serving(python, transfer, cores(0), log))
        decode = engine(stack, "decode", timeout_s)
        running.wait_until_healthy(timeout_s)
        with proxying(running.url, decode, emits_first_token=False) as proxy:
            problems = compare("packed", proxy, asked, texts)
        return problems + refusals(decode, "vllm-cpu/.*linear|linear.*vllm-cpu/")


def latents(
    python: Path, asked: dict[str, tuple[str, Json]], texts: dict[str, str], timeout_s: float
) -> list[str]:
    """Test vLLM with latents as P and as D of our own engine, and with its store: latents that are
    pulled are reordered for the reader, stored latents are not shared."""
    log, port, folder = CACHE / "vllm-mixed-latents.log", free_port(), folder_of(python, LATENT)
    pool = f"dram=256MiB,port={port},chunk={CHUNK},load=always"
    connect = f"connect=127.0.0.1:{port},chunk={CHUNK}"
    transfer = multi_config(("pull", "pool"), "kv_both", connect)
    with ExitStack() as stack:
        decode = engine(stack, "decode", timeout_s, "--kv-pool", pool, model=folder)
        prefill = engine(stack, "prefill", timeout_s, model=folder)
        words = MODELS[LATENT].words
        running = stack.enter_context(
            serving(python, transfer, cores(0), log, *words, model=folder)
        )
        running.wait_until_healthy(timeout_s)
        problems = hand_over(running.url, prefill, decode, asked, texts)
        saved, loaded = figure(running.url, SAVED), figure(decode, OUR_LOADED)
    print(f"mixed         latents: {saved:g} chunks saved, {loaded:g} loaded", flush=True)
    if not saved or loaded:
        problems.append(f"mixed: of {saved:g} chunks of vLLM's latents {loaded:g} were loaded")
    return problems


def pushed_latents(
    python: Path, asked: dict[str, tuple[str, Json]], texts: dict[str, str], timeout_s: float
) -> list[str]:
    """Test latents with the push connector, without a pool."""
    log, folder = CACHE / "vllm-mixed-pushed-latents.log", folder_of(python, LATENT)
    transfer = transfer_config("kv_both", "push", TRANSPORTS)
    pushing = ("--kv-connector", "MooncakeLayerwiseConnector")
    with ExitStack() as stack:
        prefill, decode = (
            engine(stack, role, timeout_s, *pushing, model=folder) for role in ("prefill", "decode")
        )
        words = MODELS[LATENT].words
        running = stack.enter_context(
            serving(python, transfer, cores(0), log, *words, model=folder)
        )
        running.wait_until_healthy(timeout_s)
        return hand_over(running.url, prefill, decode, asked, texts, "push")


def refusals(decode: str, named: str) -> list[str]:
    """Check that our D refused loads and logged the reason; returns the problems."""
    refused = figure(decode, OUR_REFUSALS)
    found = re.findall(f".*(?:{named}).*", engine_log("decode").read_text("utf-8", "replace"))
    print(f"mixed         {refused:g} loads were refused: {found[:1]}", flush=True)
    if refused and found:
        return []
    return [f"mixed: {refused:g} loads were refused, and the log says {found[:1]}"]


def linear_attention(python: Path) -> dict[str, str]:
    """Environment variables with which vLLM finds an attention backend with linear KV."""
    command = [python, "-c", f"{INSTALL} plugin.install(Path(sys.argv[1]))", PLUGIN]
    subprocess.run([str(word) for word in command], cwd=ROOT / "tests", check=True)
    return {"PYTHONPATH": f"{PLUGIN}:{ROOT / 'tests'}"}


def engine_log(role: str) -> Path:
    """Log file of our own engine."""
    return CACHE / f"vllm-mixed-{role}.log"


def engine(
    stack: ExitStack, role: str, timeout_s: float, *others: str, model: Path | None = None
) -> str:
    """Start an instance of our own engine, and wait until it is ready; returns its URL."""
    words = [*others, *(word for name in TRANSPORTS for word in ("--transport", name))]
    log = engine_log(role)
    url, child = start_engine(role, 1, log, "--num-kv-blocks", "1024", *words, model=model)
    stack.callback(stop, child)
    wait_until_healthy(url, log, timeout_s, [child])
    return url


def compare(
    way: str, proxy: str, asked: dict[str, tuple[str, Json]], texts: dict[str, str]
) -> list[str]:
    """Query the proxy, without and with streaming; returns the problems."""
    problems = []
    for name, (path, body) in asked.items():
        for how, extra in (("whole", {}), ("streamed", {"stream": True})):
            said, _ = ask(proxy, path, body | extra)
            # vLLM omits an incomplete character at the end of an answer.
            said, wanted = said.rstrip("\ufffd"), texts[name].rstrip("\ufffd")
            verdict = "ok" if said == wanted else "WRONG"
            print(f"mixed         {f'{way}: {name}, {how}':34} {verdict}", flush=True)
            if said != wanted:
                problems.append(f"mixed {way} {name}: {said!r:.120}, wanted {wanted!r:.120}")
    return problems


def compare_several(
    way: str, proxy: str, asked: dict[str, tuple[str, Json]], texts: dict[str, str]
) -> list[str]:
    """Request two choices with the log-probabilities of every token; returns the problems."""
    name, (path, body) = next(item for item in asked.items() if item[1][0] == COMPLETIONS)
    # Greedy requests can't have two choices; at a low temperature, a second token that is almost as
    # likely was chosen in every tenth.
    only_likeliest = {"n": 2, "temperature": 1.0, "top_k": 1, "logprobs": 1}
    answer = post(proxy, path, body | only_likeliest | {"cache_salt": f"two {way}"})
    found = [
        (choice["text"].rstrip("\ufffd"), {len(entries) for entries in choice["logprobs"].values()})
        for choice in answer.get("choices", ())
    ]
    is_right = len(found) == 2 and all(
        said == texts[name].rstrip("\ufffd") and len(lengths) == 1 for said, lengths in found
    )
    what = f"{way}: {name}, two answers with logprobs"
    print(f"mixed         {what:34} {'ok' if is_right else 'WRONG'}", flush=True)
    return [] if is_right else [f"mixed {what}: {answer!r:.300}"]


def count(url: str, loads: str, failures: str, least: int) -> list[str]:
    """Check that KV was transferred; returns the problems."""
    found, failed = figure(url, loads), figure(url, failures)
    print(f"mixed         {found:g} loads, {failed:g} failed", flush=True)
    if found < least or failed:
        return [f"mixed: {found:g} loads, wanted at least {least}; {failed:g} failed"]
    return []
