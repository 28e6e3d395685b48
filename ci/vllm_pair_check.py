"""Checks that a pair of vLLM instances with our connector answers like a single instance.

First compares the pair's answers token by token with one vLLM's: directly and through the proxy,
without and with streaming, 16 at once. Then provokes failures: parameters that are used twice,
contradict the prompt or name no instance; clients that disconnect. In the end every block must be
free on both sides, and the metrics must show that KV was transferred. Each P stays up for all pairs
that it is part of; each pair gets a new D.
"""

from __future__ import annotations

import json
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vllm_environment import DidNotStart
from vllm_pairs import MODELS, SLIDING, Pair, by_prefill, instance
from vllm_requests import (
    ANSWER_TIMEOUT_S,
    COMPLETIONS,
    METRICS_TIMEOUT_S,
    NUM_TOKENS,
    ask,
    completion,
    figure,
    post,
    token_ids,
    tokens,
    until_equal,
    until_zero,
    without_token_ids,
)
from vllm_serving import EXAMPLE, SLIDING_WINDOW, Json, RunningVllm, proxying

LENGTHS = (1, 20, 127, 128, 129, 256, 300, 1000)
"""Prompt lengths; vLLM's blocks on a CPU have 128 tokens."""
NUM_CONCURRENT = 16
CHILDREN = "n = 3"
BEYOND = "one token beyond the window"
BEYOND_TOKENS = SLIDING_WINDOW - 1 + 128  # vLLM's blocks on a CPU have 128
PUSH_FAILURES = "vllm:mooncake_hal_push_failures_total"
BYTES_SENT = "vllm:mooncake_hal_bytes_sent_total"
BYTES_RECEIVED = "vllm:mooncake_hal_bytes_received_total"
HITS = "vllm:external_prefix_cache_hits_total"
LOADS = "vllm:mooncake_hal_loads_total"
LEASES_HELD = "vllm:mooncake_hal_leases_held"
LEASES_EXPIRED = "vllm:mooncake_hal_leases_expired_total"
LOAD_FAILURES = "vllm:mooncake_hal_load_failures_total"
PICKED = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
PICKED_INFO = "vllm:cache_config_info"
"""Metrics that the Gateway API inference extension's model server protocol requires."""


def check_pairs(
    python: Path, pairs: Iterable[Pair], wanted: dict[str, Json], timeout_s: float
) -> list[str]:
    """Serve each P, with the D of each of its pairs and a proxy in turn; returns the problems.

    Args:
        python: interpreter of vLLM's environment.
        pairs: pairs of one model.
        wanted: a single vLLM's answers to the pairs' requests.
        timeout_s: seconds for an instance to start.
    """
    return [
        problem
        for group in by_prefill(pairs)
        for problem in check_pairs_of(python, group, wanted, timeout_s)
    ]


def check_pairs_of(
    python: Path, pairs: list[Pair], wanted: dict[str, Json], timeout_s: float
) -> list[str]:
    """Check the pairs of one P."""
    transports = sorted({pair.transport for pair in pairs})
    problems: list[str] = []
    with instance(python, "kv_producer", pairs[0], transports) as prefill:
        for pair in pairs:
            try:
                problems += check_pair(python, pair, prefill, wanted, timeout_s)
            except (DidNotStart, OSError) as exc:
                problems.append(f"{pair}: {exc!r}")
    return problems


def check_pair(
    python: Path, pair: Pair, prefill: RunningVllm, wanted: dict[str, Json], timeout_s: float
) -> list[str]:
    """Serve a D and a proxy with a P that is up; returns the problems.

    Raises:
        DidNotStart: P or D did not start.
        OSError: one of them does not respond.
    """
    with ExitStack() as stack:
        decode = stack.enter_context(instance(python, "kv_consumer", pair, [pair.transport]))
        for vllm in (prefill, decode):
            vllm.wait_until_healthy(timeout_s)
        proxy = stack.enter_context(proxying(prefill.url, decode.url, pair.flow))
        run = Run(pair, prefill.url, decode.url, proxy, wanted)
        for check in CHECKS["fail" if pair.policy == "fail" else pair.flow]:
            check(run)
        if pair.model == SLIDING:
            beyond_the_window(run)
    return run.problems


@dataclass
class Run:
    """A pair that serves, and its problems so far."""

    pair: Pair
    prefill: str
    decode: str
    proxy: str
    wanted: dict[str, Json]
    problems: list[str] = field(default_factory=list)
    before: dict[str, float] = field(init=False)
    """P's counters from the pairs before this one."""

    def __post_init__(self) -> None:
        self.before = {name: figure(self.prefill, name) for name in (BYTES_SENT, PUSH_FAILURES)}

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Print whether a result is as expected, and record a problem if not."""
        same, name = found == wanted, str(self.pair)
        print(f"{name:13} {what:34} {'ok' if same else 'WRONG'}", flush=True)
        if not same:
            print(f"{'':13} wanted {wanted!r:.200}\n{'':13} found  {found!r:.200}", flush=True)
            self.problems.append(f"{name} {what}: wanted {wanted!r:.200}, found {found!r:.200}")


def cases() -> dict[str, tuple[str, Json]]:
    """Paths and bodies of the requests that a pair must answer like a single instance."""
    question = next(iter(json.loads((EXAMPLE / "chat.json").read_text())["answers"]))
    chat = {"messages": [{"role": "user", "content": question}]}
    found = {f"{n} tokens": completion(tokens(n)) for n in LENGTHS}
    found |= {f"at once {n}": completion(tokens(60 + 41 * n, 1)) for n in range(NUM_CONCURRENT)}
    found |= {
        "prefix": completion(tokens(300)[:256] + tokens(90, 2)),
        CHILDREN: completion(tokens(200, 3), n=3, top_k=1, temperature=1.0),
        "logprobs": completion(tokens(170, 6), logprobs=2),
        "penalties": completion(
            # Without ignore_eos, the first token would end it before any KV transfer.
            tokens(150, 4),
            presence_penalty=1.5,
            repetition_penalty=1.2,
            ignore_eos=True,
        ),
        "invalid parameters": completion(tokens(280, 5)),
    }
    with_paths = {name: (COMPLETIONS, body) for name, body in found.items()}
    chat |= {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return with_paths | {"chat": ("/v1/chat/completions", chat)}


def cases_of(model: str) -> dict[str, tuple[str, Json]]:
    """The requests for one model; with sliding windows, including their special cases."""
    beyond = {BEYOND: (COMPLETIONS, completion(tokens(BEYOND_TOKENS)))}
    return cases() | (beyond if model == SLIDING else {})


def prefill(run: Run, path: str, body: Json) -> Json:
    """Compute a prompt on P; returns its ``kv_transfer_params``."""
    asked = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    asked.pop("n", None)
    answer = post(run.prefill, path, asked)
    return answer.get("kv_transfer_params") or {"no parameters in": answer}


def hand_over(run: Run, path: str, body: Json, **changes: object) -> Json:
    """Send a request to P, then to D with P's ``kv_transfer_params``; returns D's answer."""
    params = prefill(run, path, body) | changes
    return post(run.decode, path, body | {"kv_transfer_params": params})


# ---------------------------------------------------------------- checks


def same_tokens(run: Run) -> None:
    """Check every case sequentially, without the proxy."""
    for name, (path, body) in cases().items():
        if not name.startswith(("at once", "invalid parameters", CHILDREN)):
            run.expect(name, token_ids(hand_over(run, path, body)), token_ids(run.wanted[name]))


def concurrent_requests(run: Run) -> None:
    """Check concurrent requests."""
    named = [(name, case) for name, case in cases().items() if name.startswith("at once")]
    with ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        answers = list(threads.map(lambda item: hand_over(run, *item[1]), named))
    wanted = [token_ids(run.wanted[name]) for name, _ in named]
    run.expect(f"{NUM_CONCURRENT} at once", [token_ids(answer) for answer in answers], wanted)


def through_a_sidecar(run: Run) -> None:
    """Check the order of calls and the fields of llm-d's routing sidecar, which runs in front of D
    and gets P's address in a header; and the metrics that an InferencePool's endpoint picker
    reads."""
    body = completion(tokens(210, 8))
    wanted = token_ids(post(run.prefill, COMPLETIONS, body))
    no_peer: Json = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )
    asked = body | {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False} | no_peer
    params = post(run.prefill, COMPLETIONS, asked).get("kv_transfer_params")
    before = figure(run.decode, LOADS)
    answer = post(run.decode, COMPLETIONS, body | {"kv_transfer_params": params})
    run.expect("a sidecar's order of calls", token_ids(answer), wanted)
    run.expect("its KV was handed over", figure(run.decode, LOADS) - before, 1)
    for url, size in ((run.prefill, run.pair.prefill), (run.decode, run.pair.decode)):
        found = {name for name in PICKED if num_gauges(url, name) == size.dp}
        run.expect("an endpoint picker's gauges", found, {*PICKED})
        infos = [line for line in metrics(url) if line.startswith(f"{PICKED_INFO}{{")]
        has_labels = ['block_size="' in info and 'num_gpu_blocks="' in info for info in infos]
        run.expect("its cache info", has_labels, [True] * size.dp)


def num_gauges(url: str, name: str) -> int:
    """Number of a gauge's series on a /metrics page: one per data-parallel rank."""
    lines = metrics(url)
    series = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    return len(series) if f"# TYPE {name} gauge" in lines else 0


def metrics(url: str) -> list[str]:
    """The lines of a /metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        return answer.read().decode().splitlines()


def children(run: Run) -> None:
    """Check several choices of one request. On one data-parallel rank of D, one of them loads the
    KV for all; a lease has a single reader, so choices on another rank compute the prompt."""
    before = figure(run.decode, HITS)
    answer = hand_over(run, *cases()[CHILDREN])
    run.expect(CHILDREN, token_ids(answer), token_ids(run.wanted[CHILDREN]))
    if run.pair.decode.dp == 1:
        num_tokens = run.wanted[CHILDREN]["usage"]["prompt_tokens"]
        run.expect("tokens pulled for them", figure(run.decode, HITS) - before, num_tokens)
        run.expect("loads that failed for them", figure(run.decode, LOAD_FAILURES), 0)


def kv_was_pulled(run: Run) -> None:
    """Check that all KV that D lacked was pulled, and that no load failed."""
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), 0)
    prompts = sum(
        answer["usage"]["prompt_tokens"]
        for name, answer in run.wanted.items()
        if name not in ("invalid parameters", CHILDREN, BEYOND)
    )
    # A prompt of one token is not worth a load; two blocks of "prefix" are in D's own cache.
    num_there = 1 + (256 if MODELS[run.pair.model].has_prefix_cache else 0)
    run.expect("tokens that were pulled", figure(run.decode, HITS), prompts - num_there)


def through_the_proxy(run: Run) -> None:
    """Compare texts through the proxy, without and with streaming."""
    for name, (path, body) in cases().items():
        if name.startswith(("at once", "n =", "invalid parameters", "1 tokens")):
            continue
        plain = without_token_ids(body)
        [choice] = run.wanted[name]["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        wanted = text, choice["finish_reason"]
        for how, extra in (("whole", {}), ("streamed", {"stream": True})):
            run.expect(f"proxy: {name}, {how}", ask(run.proxy, path, plain | extra), wanted)
    fallbacks = figure(run.proxy, "mooncake_proxy_local_prefill_total")
    run.expect("prompts that D computed itself", fallbacks, 0)


def children_through_the_proxy(run: Run) -> None:
    """Check several choices through the proxy: P computes one and grants one lease, from which D
    starts all choices."""
    path, body = cases()[CHILDREN]
    before, expired = figure(run.decode, LOADS), figure(run.prefill, LEASES_EXPIRED)
    answer = post(run.proxy, path, body | {"cache_salt": "through the proxy"})
    run.expect(f"proxy: {CHILDREN}", token_ids(answer), token_ids(run.wanted[CHILDREN]))
    if run.pair.decode.dp == 1:
        run.expect("loads for them", figure(run.decode, LOADS) - before, 1)
    fallbacks = figure(run.proxy, "mooncake_proxy_local_prefill_total")
    run.expect("prompts that D computed for them", fallbacks, 0)
    run.expect("leases after them", until_zero(run.prefill, LEASES_HELD), 0)
    run.expect("leases that expired", figure(run.prefill, LEASES_EXPIRED) - expired, 0)


def concurrent_requests_through_the_proxy(run: Run) -> None:
    """Check concurrent requests through the proxy, and several choices of one request."""
    named = [(name, case) for name, case in cases().items() if name.startswith("at once")]
    with ThreadPoolExecutor(NUM_CONCURRENT) as threads:
        answers = list(threads.map(lambda item: post(run.proxy, *item[1]), named))
    wanted = [token_ids(run.wanted[name]) for name, _ in named]
    run.expect(
        f"proxy: {NUM_CONCURRENT} at once", [token_ids(answer) for answer in answers], wanted
    )
    children = token_ids(post(run.proxy, *cases()[CHILDREN]))
    run.expect("proxy: n = 3", children, token_ids(run.wanted[CHILDREN]))


def kv_was_pushed(run: Run) -> None:
    """Check that both sides counted the pushed KV, and that no push failed."""
    failures = figure(run.prefill, PUSH_FAILURES) - run.before[PUSH_FAILURES]
    run.expect("push failures", failures, 0)
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), 0)
    received, before = figure(run.decode, BYTES_RECEIVED), run.before[BYTES_SENT]
    sent = until_equal(run.prefill, BYTES_SENT, before + received) - before
    run.expect("bytes", received, sent)
    run.expect("some bytes", sent > 0, True)


def clients_of_the_proxy_leave(run: Run) -> None:
    """Disconnect clients of the proxy while P computes, and while D responds."""
    path, body = cases()["invalid parameters"]
    for seed in range(6):
        long = completion(tokens(900, 10 + seed), max_tokens=200, stream=True)
        leave(run.proxy, path, long)
    run.expect(
        "after that",
        token_ids(post(run.proxy, path, body)),
        token_ids(run.wanted["invalid parameters"]),
    )


def invalid_parameters(run: Run) -> None:
    """Send parameters that can't be honoured: D must compute the prompt and give the same
    answer."""
    path, body = cases()["invalid parameters"]
    wanted = token_ids(run.wanted["invalid parameters"])
    params = prefill(run, path, body)
    for what in ("first use", "second use"):
        answer = post(run.decode, path, body | {"kv_transfer_params": params})
        run.expect(what, token_ids(answer), wanted)
    changes: dict[str, Json] = {
        "unknown id": {"remote_engine_id": "nobody"},
        "closed port": {"remote_port": 1},
        "another prompt": {"prompt_digest": "another"},
        "a bad port": {"remote_port": "x"},
        "no blocks": {"remote_block_ids": [[]] * MODELS[run.pair.model].num_groups},
        "foreign blocks": {"remote_block_ids": [[2**30]] * MODELS[run.pair.model].num_groups},
    }
    for number, (what, change) in enumerate(changes.items()):
        fresh = completion(tokens(280, 5), cache_salt=f"invalid parameters {number}")
        run.expect(what, token_ids(hand_over(run, path, fresh, **change)), wanted)
    refused = hand_over(run, path, completion(tokens(280, 6), max_tokens=100_000))
    run.expect("a request that D's API server rejects", "error" in refused, True)


def failed_loads_are_errors(run: Run) -> None:
    """Check that a failed load fails its own request only, as vLLM is configured to do."""
    path, body = cases()["invalid parameters"]
    changes: dict[str, Json] = {
        "closed port": {"remote_port": 1},
        "unknown id": {"remote_engine_id": "nobody"},
    }
    for number, (what, change) in enumerate(changes.items()):
        fresh = body | {"cache_salt": f"fail {number}"}
        run.expect(what, "error" in hand_over(run, path, fresh, **change), True)
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), len(changes))
    run.expect(
        "D after that",
        token_ids(hand_over(run, path, body)),
        token_ids(run.wanted["invalid parameters"]),
    )


def clients_leave(run: Run) -> None:
    """Disconnect clients at every stage: while P computes, before D is asked, while D responds."""
    path, body = cases()["invalid parameters"]
    for seed in range(6):
        long = completion(tokens(900, 10 + seed), max_tokens=200)
        leave(run.prefill, path, long | {"kv_transfer_params": {"do_remote_decode": True}})
        params = prefill(run, path, long)
        leave(run.decode, path, long | {"kv_transfer_params": params, "stream": True})
    run.expect(
        "D after that",
        token_ids(hand_over(run, path, body)),
        token_ids(run.wanted["invalid parameters"]),
    )


def leave(url: str, path: str, body: Json) -> None:
    """Send a request and disconnect without waiting for an answer."""
    address = urllib.parse.urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), ANSWER_TIMEOUT_S) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def beyond_the_window(run: Run) -> None:
    """Check a prompt whose last token, if D recomputes it, attends to a token that P did not keep:
    D computes the whole prompt. If P's token is part of the prompt, the KV is transferred."""
    path, body = COMPLETIONS, completion(tokens(BEYOND_TOKENS))
    wanted = run.wanted[BEYOND]
    refused = "vllm:mooncake_hal_refused_requests_total"
    before = figure(run.decode, refused), figure(run.decode, LOADS)
    is_pull = run.pair.flow == "pull"
    if is_pull:
        run.expect(BEYOND, token_ids(hand_over(run, path, body)), token_ids(wanted))
        run.expect("prompts that D computed", figure(run.decode, refused) - before[0], 1)
    salted = without_token_ids(body) | {"cache_salt": BEYOND, "stream": True}
    [choice] = wanted["choices"]
    answer = choice["text"], choice["finish_reason"]
    run.expect(f"proxy: {BEYOND}, streamed", ask(run.proxy, path, salted), answer)
    run.expect("loads with P's token", figure(run.decode, LOADS) - before[1], int(is_pull))


def nothing_is_left(run: Run) -> None:
    """Check that every block is free, no lease is held, and no hook has failed."""
    for name, url in (("P", run.prefill), ("D", run.decode)):
        for what in ("vllm:kv_cache_usage_perc", LEASES_HELD):
            run.expect(f"{name} {what}", until_zero(url, what), 0)
        run.expect(f"{name} hook errors", figure(url, "vllm:mooncake_hal_hook_errors_total"), 0)


CHECKS: dict[str, tuple[Callable[[Run], None], ...]] = {
    "pull": (
        same_tokens,
        concurrent_requests,
        kv_was_pulled,
        children,
        through_a_sidecar,
        through_the_proxy,
        children_through_the_proxy,
        invalid_parameters,
        clients_leave,
        nothing_is_left,
    ),
    "fail": (same_tokens, children, failed_loads_are_errors, nothing_is_left),
    "push": (
        through_the_proxy,
        concurrent_requests_through_the_proxy,
        kv_was_pushed,
        clients_of_the_proxy_leave,
        nothing_is_left,
    ),
}
