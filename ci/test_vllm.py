"""Our connector inside a real vLLM (its CPU build): tokens, bookkeeping, and who frees what.

    python ci/test_vllm.py [--parts unit,pairs] [--pairs 1:1/shm,2:1/tcp,1:2/shm/push]
        [--pairs 1:1/shm/pull/recompute/sliding]

Parts: unit is tests/vllm, vLLM's own scheduler and views without a server; up what make up
ENGINE=vllm starts; pool the pool's connector; multi vLLM's MultiConnector with ours in it; mixed P
on vLLM with D on our own engine, and back, also by the pool; fleet two Ps, of which the proxy's
conductor chooses and one dies; pairs what follows.

A pair is P's and D's tensor-parallel size (1x2: with two pipeline stages; 1d2: with two
data-parallel ranks), the transport, who moves KV, vLLM's kv_load_failure_policy (recompute), and
the model: full, or sliding, whose layers have blocks of three KV-cache groups.
First one vLLM answers alone; then, for each pair, P and D with our connector answer the same, in
fp32: token for token the same, directly and through the proxy, whole and streamed, 16 at once. Then
what goes wrong on purpose: parameters that are used twice, contradict the prompt or name nobody;
clients that leave. In the end every block is free on both sides, and the figures say that KV came
over. A P stays up for all pairs that it is part of; each D is a new one.

Exit 0: all as wanted; 1: something was not; 77: "skipped: ..." and why vLLM can't be run here.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vllm_environment import CACHE, ROOT, DidNotStart, exit_status, install_connector
from vllm_fleet_check import check_fleet
from vllm_mixed_check import check_mixed
from vllm_multi_check import check_multi
from vllm_pool_check import check_pool
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
from vllm_serving import (
    EXAMPLE,
    OF_EXAMPLE,
    SLIDING_WINDOW,
    Json,
    cores,
    prepare,
    prepare_sliding,
    proxying,
    serving,
    transfer_config,
    wait_until_healthy,
)
from vllm_up_check import check_up

LENGTHS = (1, 20, 127, 128, 129, 256, 300, 1000)
"""Of prompts: vLLM's blocks on a CPU have 128 tokens."""
NUM_AT_ONCE = 16
CHILDREN = "n = 3"
PATIENCE_S = 120.0
"""For a transfer: where others work, too, a worker that got no processor once stood for 30 s."""
FULL = "full"
NUM_GROUPS = {FULL: 1, "sliding": 3}
"""KV-cache groups, by model."""
BEYOND = "one token beyond the window"
BEYOND_TOKENS = SLIDING_WINDOW - 1 + 128  # vLLM's blocks on a CPU have 128
SECRET = CACHE / "vllm-secret"
PUSH_FAILURES = "vllm:mooncake_hal_push_failures_total"
BYTES_SENT = "vllm:mooncake_hal_bytes_sent_total"
BYTES_RECEIVED = "vllm:mooncake_hal_bytes_received_total"
HITS = "vllm:external_prefix_cache_hits_total"
LOADS = "vllm:mooncake_hal_loads_total"
LOAD_FAILURES = "vllm:mooncake_hal_load_failures_total"
PICKED = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
PICKED_INFO = "vllm:cache_config_info"
"""What the model server protocol of the Gateway API inference extension wants of a server."""
PARTS = ("unit", "up", "pool", "multi", "mixed", "fleet", "pairs")
ALL_PAIRS = ",".join(
    [
        f"{prefill}:{decode}/{transport}/{flow}"
        for flow in ("pull", "push")
        for prefill in (1, 2)
        for decode in (1, 2)
        for transport in ("shm", "tcp")
    ]
    + ["1x2:1/shm", "1x2:1/shm/push", "1:1x2/shm", "1d2:1/tcp", "1:1d2/tcp", "1d2:1/shm/push"]
    + ["1:1/shm/pull/fail"]
    + [f"{pair}/recompute/sliding" for pair in ("1:1/shm/pull", "2:1/tcp/pull", "1:2/shm/push")]
)


def main() -> int:
    """Install, serve, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--pairs", default=ALL_PAIRS, help="P:D/transport[/flow[/policy[/model]]], ...: all"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds for vLLM")
    args = parser.parse_args()
    return exit_status(partial(find_problems, args))


def find_problems(args: argparse.Namespace) -> list[str]:
    """All parts that are asked for; returns what was wrong.

    Raises:
        Skip: vLLM can't be run here.
    """
    python, parts = prepare(), args.parts.split(",")
    install_connector(python)
    problems = run_tests(python) if "unit" in parts else []
    if "up" in parts:
        problems += check_up(python, args.start_timeout)
    if not {*parts} - {"unit", "up"}:
        return problems
    pairs = [Pair.parse(text) for text in args.pairs.split(",") if "pairs" in parts]
    wanted = answers_alone(python, args.start_timeout, cases())
    chosen = {f"{n} tokens": cases()[f"{n} tokens"] for n in LENGTHS if n > 128}
    for part, check in BESIDE_PAIRS.items():
        if part in parts:
            problems += check(python, chosen, wanted, args.start_timeout)
    for group in by_prefill(pair for pair in pairs if pair.model == FULL):
        problems += check_pairs(python, group, wanted, args)
    if sliding := [pair for pair in pairs if pair.model != FULL]:
        asked = cases() | {BEYOND: (COMPLETIONS, completion(tokens(BEYOND_TOKENS)))}
        wanted = answers_alone(python, args.start_timeout, asked, sliding[0].model)
        for group in by_prefill(sliding):
            problems += check_pairs(python, group, wanted, args)
    return problems


def run_tests(python: Path) -> list[str]:
    """Those that need vLLM and no server, in its environment; returns what was wrong."""
    command = [python, "-m", "pytest", "-q", "--timeout=900", "tests/vllm"]
    # Warnings of other people's packages are not ours to mend.
    status = subprocess.run([*command, "-o", "filterwarnings=default"], cwd=ROOT, check=False)
    return ["tests/vllm failed"] if status.returncode else []


# ---------------------------------------------------------------- what runs


@dataclass(frozen=True)
class Size:
    """Of an instance: tensor-parallel ranks, pipeline stages, data-parallel ranks."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> Size:
        """Read ``2``, or with stages ``1x2``, or with data-parallel ranks ``1d2``."""
        tp, pp, dp = re.fullmatch(r"(\d+)(?:x(\d+))?(?:d(\d+))?", text).groups("1")  # type: ignore[union-attr]  # ends with a trace
        return cls(int(tp), int(pp), int(dp))

    def __str__(self) -> str:
        stages = f"x{self.pp}" if self.pp > 1 else ""
        return f"{self.tp}{stages}" + (f"d{self.dp}" if self.dp > 1 else "")

    @property
    def words(self) -> tuple[str, ...]:
        """Of ``vllm serve``."""
        found = ["--tensor-parallel-size", str(self.tp), "--data-parallel-size", str(self.dp)]
        if self.pp > 1:
            # Without a warm-up vLLM's later stages have no buffer for what comes in, and die.
            found += ["--pipeline-parallel-size", str(self.pp), "--no-enforce-eager"]
        return tuple(found)


@dataclass(frozen=True)
class Pair:
    """Two instances.

    Args:
        prefill, decode: their sizes.
        transport: by which KV goes.
        flow: ``"pull"`` or ``"push"``.
        policy: what D does about a load that failed: ``"recompute"`` or ``"fail"``.
        model: ``FULL`` or ``"sliding"``.
    """

    prefill: Size
    decode: Size
    transport: str
    flow: str = "pull"
    policy: str = "recompute"
    model: str = FULL

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read ``2:1/tcp``, ``1x2:1/shm``, ``1:1/shm/push``, ``1:1/shm/pull/fail`` or
        ``1:1/shm/pull/recompute/sliding``."""
        sizes, *others = text.split("/")
        prefill, _, decode = sizes.partition(":")
        return cls(Size.parse(prefill), Size.parse(decode), *others)

    def __str__(self) -> str:
        policy = "" if self.policy == "recompute" else f"/{self.policy}"
        model = "" if self.model == FULL else f"/{self.model}"
        return f"{self.prefill}:{self.decode}/{self.transport}/{self.flow}{policy}{model}"


def served(python: Path, model: str) -> tuple[Path | None, tuple[str, ...]]:
    """What an instance is started with to serve a pair's model: its folder, and words."""
    return (None, ()) if model == FULL else (prepare_sliding(python), OF_EXAMPLE)


def answers_alone(
    python: Path, timeout_s: float, asked: dict[str, tuple[str, Json]], model: str = FULL
) -> dict[str, Json]:
    """What one vLLM answers to everything that is asked of pairs."""
    log = CACHE / "vllm-alone.log"
    folder, words = served(python, model)
    with serving(python, None, "0", log, *words, model=folder) as url:
        wait_until_healthy(url, log, timeout_s)
        answers = {name: post(url, path, body) for name, (path, body) in asked.items()}
    for name, answer in answers.items():
        if "choices" not in answer:
            raise SystemExit(f"one vLLM alone does not answer {name}: {answer}")
    return answers


def by_prefill(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs that one P serves together."""
    groups: dict[tuple[Size, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.prefill, pair.flow), []).append(pair)
    return list(groups.values())


def check_pairs(
    python: Path, pairs: list[Pair], wanted: dict[str, Json], args: argparse.Namespace
) -> list[str]:
    """Serve one P, with each pair's D and a proxy in turn; returns what was wrong."""
    first, timeout_s = pairs[0], args.start_timeout
    transports = sorted({pair.transport for pair in pairs})
    problems: list[str] = []
    with instance(python, "kv_producer", first, transports) as prefill:
        for pair in pairs:
            try:
                problems += check_pair(python, pair, prefill, wanted, timeout_s)
            except (DidNotStart, OSError) as exc:
                problems.append(f"{pair}: {exc!r}")
    return problems


def check_pair(
    python: Path, pair: Pair, prefill: str, wanted: dict[str, Json], timeout_s: float
) -> list[str]:
    """Serve a D and a proxy beside a P; returns what was wrong.

    Raises:
        DidNotStart: P or D has not come up.
        OSError: one of them does not answer.
    """
    with ExitStack() as stack:
        decode = stack.enter_context(instance(python, "kv_consumer", pair, [pair.transport]))
        for url, role in ((prefill, "kv_producer"), (decode, "kv_consumer")):
            wait_until_healthy(url, instance_log(role), timeout_s)
        proxy = stack.enter_context(proxying(prefill, decode, pair.flow))
        run = Run(pair, prefill, decode, proxy, wanted)
        for check in CHECKS["fail" if pair.policy == "fail" else pair.flow]:
            check(run)
        if pair.model != FULL:
            beyond_the_window(run)
    return run.problems


@contextmanager
def instance(python: Path, role: str, pair: Pair, transports: list[str]) -> Iterator[str]:
    """A vLLM with our connector, in a deployment with a secret; its URL. Not necessarily up yet."""
    SECRET.touch(mode=0o600)
    SECRET.write_text("of these pairs\n")
    settings = {"transfer_timeout_seconds": PATIENCE_S, "secret_file": str(SECRET)}
    transfer = transfer_config(role, pair.flow, transports, **settings)
    size = pair.prefill if role == "kv_producer" else pair.decode
    folder, words = served(python, pair.model)
    with serving(
        python,
        transfer | {"kv_load_failure_policy": pair.policy},
        cores(0 if role == "kv_producer" else 1, size.tp * size.pp * size.dp),
        instance_log(role),
        *(*words, *size.words, "--max-num-batched-tokens", "256"),
        model=folder,
    ) as url:
        yield url


def instance_log(role: str) -> Path:
    """Where an instance of that role writes."""
    return CACHE / f"vllm-{role}.log"


# ---------------------------------------------------------------- what is asked


@dataclass
class Run:
    """A pair that serves, and what has been wrong with it so far."""

    pair: Pair
    prefill: str
    decode: str
    proxy: str
    wanted: dict[str, Json]
    problems: list[str] = field(default_factory=list)
    before: dict[str, float] = field(init=False)
    """What P has counted for the pairs before this one."""

    def __post_init__(self) -> None:
        self.before = {name: figure(self.prefill, name) for name in (BYTES_SENT, PUSH_FAILURES)}

    def expect(self, what: str, found: object, wanted: object) -> None:
        """Say whether something is as wanted."""
        same, name = found == wanted, str(self.pair)
        print(f"{name:13} {what:34} {'ok' if same else 'WRONG'}", flush=True)
        if not same:
            print(f"{'':13} wanted {wanted!r:.200}\n{'':13} found  {found!r:.200}", flush=True)
            self.problems.append(f"{name} {what}: wanted {wanted!r:.200}, found {found!r:.200}")


def cases() -> dict[str, tuple[str, Json]]:
    """Path and body of all that a pair has to answer as one instance does."""
    question = next(iter(json.loads((EXAMPLE / "chat.json").read_text())["answers"]))
    chat = {"messages": [{"role": "user", "content": question}]}
    found = {f"{n} tokens": completion(tokens(n)) for n in LENGTHS}
    found |= {f"at once {n}": completion(tokens(60 + 41 * n, 1)) for n in range(NUM_AT_ONCE)}
    found |= {
        "prefix": completion(tokens(300)[:256] + tokens(90, 2)),
        CHILDREN: completion(tokens(200, 3), n=3, temperature=0.01),  # all but greedy
        "logprobs": completion(tokens(170, 6), logprobs=2),
        "penalties": completion(
            # Without ignore_eos the first token ends it, and nothing is handed over.
            tokens(150, 4),
            presence_penalty=1.5,
            repetition_penalty=1.2,
            ignore_eos=True,
        ),
        "trouble": completion(tokens(280, 5)),
    }
    with_paths = {name: (COMPLETIONS, body) for name, body in found.items()}
    chat |= {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    return with_paths | {"chat": ("/v1/chat/completions", chat)}


def prefill(run: Run, path: str, body: Json) -> Json:
    """Compute a prompt on P; returns its answer's parameters."""
    asked = body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    asked.pop("n", None)
    answer = post(run.prefill, path, asked)
    return answer.get("kv_transfer_params") or {"no parameters in": answer}


def hand_over(run: Run, path: str, body: Json, **changes: object) -> Json:
    """P, then D with what P said."""
    params = prefill(run, path, body) | changes
    return post(run.decode, path, body | {"kv_transfer_params": params})


# ---------------------------------------------------------------- checks


def same_tokens(run: Run) -> None:
    """By hand, one after the other: every case has one instance's tokens."""
    for name, (path, body) in cases().items():
        if not name.startswith(("at once", "trouble", CHILDREN)):
            run.expect(name, token_ids(hand_over(run, path, body)), token_ids(run.wanted[name]))


def at_once(run: Run) -> None:
    """Many, at the same time."""
    named = [(name, case) for name, case in cases().items() if name.startswith("at once")]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        answers = list(threads.map(lambda item: hand_over(run, *item[1]), named))
    wanted = [token_ids(run.wanted[name]) for name, _ in named]
    run.expect(f"{NUM_AT_ONCE} at once", [token_ids(answer) for answer in answers], wanted)


def through_a_sidecar(run: Run) -> None:
    """The order of calls and the fields of llm-d's routing sidecar, which sits before D and is told
    of P by a header; and the gauges that an InferencePool's endpoint picker reads."""
    body = completion(tokens(210, 8))
    wanted = token_ids(post(run.prefill, COMPLETIONS, body))
    nobody: Json = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )
    asked = body | {"stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False} | nobody
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
        run.expect("its facts of the cache", has_labels, [True] * size.dp)


def num_gauges(url: str, name: str) -> int:
    """How many series a gauge of a /metrics page has, one per data-parallel rank."""
    lines = metrics(url)
    series = [line for line in lines if line.partition("{")[0].partition(" ")[0] == name]
    return len(series) if f"# TYPE {name} gauge" in lines else 0


def metrics(url: str) -> list[str]:
    """The lines of a /metrics page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
        return answer.read().decode().splitlines()


def children(run: Run) -> None:
    """Of one request. On one data-parallel rank of D one of them loads for all; a lease has one
    reader, so that those on another rank compute their prompt."""
    before = figure(run.decode, HITS)
    answer = hand_over(run, *cases()[CHILDREN])
    run.expect(CHILDREN, token_ids(answer), token_ids(run.wanted[CHILDREN]))
    if run.pair.decode.dp == 1:
        num_tokens = run.wanted[CHILDREN]["usage"]["prompt_tokens"]
        run.expect("tokens pulled for them", figure(run.decode, HITS) - before, num_tokens)
        run.expect("loads that failed for them", figure(run.decode, LOAD_FAILURES), 0)


def kv_came_over(run: Run) -> None:
    """So far everything that was not here has been pulled, and nothing failed."""
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), 0)
    prompts = sum(
        answer["usage"]["prompt_tokens"]
        for name, answer in run.wanted.items()
        if name not in ("trouble", CHILDREN, BEYOND)
    )
    hits = figure(run.decode, HITS)
    # A prompt of one token is not worth a load; two blocks of "prefix" were there already.
    run.expect("tokens that were pulled", hits, prompts - 1 - 256)


def through_the_proxy(run: Run) -> None:
    """Texts, whole and streamed."""
    for name, (path, body) in cases().items():
        if name.startswith(("at once", "n =", "trouble", "1 tokens")):
            continue
        plain = without_token_ids(body)
        [choice] = run.wanted[name]["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        wanted = text, choice["finish_reason"]
        for how, extra in (("whole", {}), ("streamed", {"stream": True})):
            run.expect(f"proxy: {name}, {how}", ask(run.proxy, path, plain | extra), wanted)
    fallbacks = figure(run.proxy, "mooncake_proxy_local_prefill_total")
    run.expect("prompts that D computed itself", fallbacks, 0)


def at_once_through_the_proxy(run: Run) -> None:
    """Many, at the same time; and children of one request."""
    named = [(name, case) for name, case in cases().items() if name.startswith("at once")]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        answers = list(threads.map(lambda item: post(run.proxy, *item[1]), named))
    wanted = [token_ids(run.wanted[name]) for name, _ in named]
    run.expect(f"proxy: {NUM_AT_ONCE} at once", [token_ids(answer) for answer in answers], wanted)
    children = token_ids(post(run.proxy, *cases()[CHILDREN]))
    run.expect("proxy: n = 3", children, token_ids(run.wanted[CHILDREN]))


def kv_was_pushed(run: Run) -> None:
    """Both sides have counted it, and nothing failed."""
    failures = figure(run.prefill, PUSH_FAILURES) - run.before[PUSH_FAILURES]
    run.expect("push failures", failures, 0)
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), 0)
    received, before = figure(run.decode, BYTES_RECEIVED), run.before[BYTES_SENT]
    sent = until_equal(run.prefill, BYTES_SENT, before + received) - before
    run.expect("bytes", received, sent)
    run.expect("some bytes", sent > 0, True)


def clients_of_the_proxy_leave(run: Run) -> None:
    """While P computes, and while D answers."""
    path, body = cases()["trouble"]
    for seed in range(6):
        long = completion(tokens(900, 10 + seed), max_tokens=200, stream=True)
        leave(run.proxy, path, long)
    run.expect(
        "after that", token_ids(post(run.proxy, path, body)), token_ids(run.wanted["trouble"])
    )


def trouble(run: Run) -> None:
    """Parameters that can't be honoured: D computes by itself, and says the same."""
    path, body = cases()["trouble"]
    wanted = token_ids(run.wanted["trouble"])
    params = prefill(run, path, body)
    for what in ("first use", "second use"):
        answer = post(run.decode, path, body | {"kv_transfer_params": params})
        run.expect(what, token_ids(answer), wanted)
    changes: dict[str, Json] = {
        "nobody's id": {"remote_engine_id": "nobody"},
        "nobody's port": {"remote_port": 1},
        "another prompt": {"prompt_digest": "another"},
        "a bad port": {"remote_port": "x"},
        "no blocks": {"remote_block_ids": [[]] * NUM_GROUPS[run.pair.model]},
        "foreign blocks": {"remote_block_ids": [[2**30]] * NUM_GROUPS[run.pair.model]},
    }
    for number, (what, change) in enumerate(changes.items()):
        fresh = completion(tokens(280, 5), cache_salt=f"trouble {number}")
        run.expect(what, token_ids(hand_over(run, path, fresh, **change)), wanted)
    refused = hand_over(run, path, completion(tokens(280, 6), max_tokens=100_000))
    run.expect("a request that D's front refuses", "error" in refused, True)


def failed_loads_are_errors(run: Run) -> None:
    """A load that fails ends its request with an error, as vLLM was told to, and no other one."""
    path, body = cases()["trouble"]
    changes: dict[str, Json] = {
        "nobody's port": {"remote_port": 1},
        "nobody's id": {"remote_engine_id": "nobody"},
    }
    for number, (what, change) in enumerate(changes.items()):
        fresh = body | {"cache_salt": f"fail {number}"}
        run.expect(what, "error" in hand_over(run, path, fresh, **change), True)
    run.expect("load failures", figure(run.decode, LOAD_FAILURES), len(changes))
    run.expect(
        "D after that", token_ids(hand_over(run, path, body)), token_ids(run.wanted["trouble"])
    )


def clients_leave(run: Run) -> None:
    """At every stage: while P computes, before D is asked, while D answers."""
    path, body = cases()["trouble"]
    for seed in range(6):
        long = completion(tokens(900, 10 + seed), max_tokens=200)
        leave(run.prefill, path, long | {"kv_transfer_params": {"do_remote_decode": True}})
        params = prefill(run, path, long)
        leave(run.decode, path, long | {"kv_transfer_params": params, "stream": True})
    run.expect(
        "D after that", token_ids(hand_over(run, path, body)), token_ids(run.wanted["trouble"])
    )


def leave(url: str, path: str, body: Json) -> None:
    """Ask, and hang up without waiting for an answer."""
    address = urllib.parse.urlsplit(url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), ANSWER_TIMEOUT_S) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def beyond_the_window(run: Run) -> None:
    """A prompt whose last token, where D computes it again, needs a token that no P keeps: D does
    all of it; where P's token is part of the prompt, its KV comes over."""
    path, body = COMPLETIONS, completion(tokens(BEYOND_TOKENS))
    wanted = run.wanted[BEYOND]
    refused = "vllm:mooncake_hal_refused_requests_total"
    before = figure(run.decode, refused), figure(run.decode, LOADS)
    is_pull = run.pair.flow == "pull"
    if is_pull:
        run.expect(BEYOND, token_ids(hand_over(run, path, body)), token_ids(wanted))
        run.expect("is computed by D", figure(run.decode, refused) - before[0], 1)
    salted = without_token_ids(body) | {"cache_salt": BEYOND, "stream": True}
    [choice] = wanted["choices"]
    answer = choice["text"], choice["finish_reason"]
    run.expect(f"proxy: {BEYOND}, streamed", ask(run.proxy, path, salted), answer)
    run.expect("comes over behind P's token", figure(run.decode, LOADS) - before[1], int(is_pull))


def all_is_free(run: Run) -> None:
    """Every block is free, no lease is held, and no hook has failed."""
    for name, url in (("P", run.prefill), ("D", run.decode)):
        for what in ("vllm:kv_cache_usage_perc", "vllm:mooncake_hal_leases_held"):
            run.expect(f"{name} {what}", until_zero(url, what), 0)
        run.expect(f"{name} hook errors", figure(url, "vllm:mooncake_hal_hook_errors_total"), 0)


BESIDE_PAIRS = {
    "pool": check_pool,
    "multi": check_multi,
    "mixed": check_mixed,
    "fleet": check_fleet,
}
CHECKS: dict[str, tuple[Callable[[Run], None], ...]] = {
    "pull": (
        same_tokens,
        at_once,
        kv_came_over,
        children,
        through_a_sidecar,
        through_the_proxy,
        trouble,
        clients_leave,
        all_is_free,
    ),
    "fail": (same_tokens, children, failed_loads_are_errors, all_is_free),
    "push": (
        through_the_proxy,
        at_once_through_the_proxy,
        kv_was_pushed,
        clients_of_the_proxy_leave,
        all_is_free,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
