"""Benchmarks vLLM's CPU build alone, as pairs with its own connectors, and as pairs with ours.

    python ci/bench_vllm.py [--clients 1,4,8,16] [--rounds 3] [--groups pull,push,engine,nixl]
        [--shapes chat,long] [--device paced]

With ``--device paced`` vLLM runs on a simulated device with an H200's step times and the KV of a 7
B model (vllm_paced_worker.py), so that the CPU does only the work of a GPU's host.

All contenders of a group are up at the same time, which takes some 3 GB per pair, and are warmed up
before they are measured. In each round and for each number of clients, every contender in turn
serves uncached prompts: ``chat``, 256 tokens with 64 output tokens; ``long``, 1,920 with 10, about
as in vLLM's own benchmark of disaggregated prefill. The median over the rounds of the ratio within
a round is compared. Prints a table, the time that a pair's request spends in each stage by vLLM's
own metrics, then one line per bound: name, figure, bound, ok or short.

Exits 0 if all bounds hold, 1 if one does not, 77 with the reason if vLLM or a requested contender
can't run here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from vllm_contenders import CONTENDERS, Contender, running
from vllm_environment import SKIPPED, Skip, exit_on_sigterm, install_connector
from vllm_pace import (
    BY_ITSELF,
    HITS,
    LOADS,
    REQUESTS_PER_WINDOW,
    Turn,
    measure_turns,
    ratio_of,
)
from vllm_requests import COMPLETIONS, completion, figure, post, timed_choices, tokens
from vllm_serving import Json, family, prepare, title

NUM_IN, NUM_OUT = 256, 64
SHAPES = {"chat": (NUM_IN, NUM_OUT), "long": (1920, 10)}
"""Prompt tokens and output tokens, by shape."""
ALONE, THEIRS = "one vLLM", "mooncake tcp"
PEERS = (THEIRS, "nixl")
OURS = ("ours shm", "ours tcp", "ours push")
GROUPS = {
    "pull": ((ALONE, THEIRS, "ours shm", "ours tcp"),),
    "push": ((THEIRS, "ours push"),),
    "engine": (("one engine", "engine pair"),),
    "nixl": (("nixl",),),
}
"""Contenders that are up at the same time and compared. NIXL's pair keeps both cores busy when
idle."""
PACED_GROUPS = {
    "pull": ((ALONE, THEIRS, "ours shm"), (THEIRS, "ours tcp")),
    "push": GROUPS["push"],
    "nixl": GROUPS["nixl"],
}
"""The groups with paced devices: an instance takes some 3.5 GB. They exclude our own engine."""
REQUESTS_PER_CLIENT = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
WANTED_SPEED_UP, WANTED_OF_ENGINE = 1.2, 0.9
HAND_OVER_MS, NUM_STEPS = 5.0, 2
WANTED_TPOT = 1.03
PACE_STREAMS, TURNS_PER_STREAM, PACE_TOKENS = 6, 4, 1_600
STAGES = (
    ("on P", "prefill", ("e2e_request_latency",)),
    ("D waits", "decode", ("request_queue_time",)),
    ("D runs", "decode", ("request_prefill_time", "request_decode_time")),
)
"""Stages of a pair's request: name, role of the instance, and vLLM's histograms for it. D's waiting
time includes the queue and the KV transfer."""


Answers = dict[tuple[str, int, int], list[str]]
"""Expected answers, by shape, clients and round."""


@dataclass(frozen=True)
class Timing:
    """One answer: its text, and when its tokens arrived, in seconds after the request."""

    first_s: float
    last_s: float
    text: str
    num_out: int

    @property
    def tpot_s(self) -> float:
        """Mean time between two tokens."""
        return (self.last_s - self.first_s) / (self.num_out - 1)


@dataclass(frozen=True)
class Figures:
    """Results of one contender at one load in one round."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    core_cpu_ms: float
    num_differing: int
    stages_ms: tuple[float, ...]


@dataclass(frozen=True)
class Item:
    """A figure with its bound."""

    name: str
    found: str
    wanted: str
    holds: bool


@dataclass
class Results:
    """Results of a group and a shape by contender and clients, one per round, and their
    verdicts."""

    shape: str
    rounds: dict[tuple[str, int], list[Figures]] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)

    def mid(self, name: str, clients: int, figure: str) -> float:
        """The median of one figure over the rounds."""
        return float(median(getattr(row, figure) for row in self.rounds[name, clients]))

    def ratio(self, first: str, second: str, clients: int, figure: str) -> float:
        """The median over the rounds of one contender's figure divided by another's."""
        pairs = zip(self.rounds[first, clients], self.rounds[second, clients], strict=True)
        return float(median(getattr(a, figure) / max(getattr(b, figure), 1e-9) for a, b in pairs))

    def judge(self, name: str, found: str, wanted: str, holds: bool) -> None:
        """Add an item."""
        self.items.append(Item(f"{self.shape}: {name}", found, wanted, holds))


def main() -> int:
    """Start, measure, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", default="1,4,8,16", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--groups", help=f"any of {', '.join(GROUPS)}; default: all of the device")
    parser.add_argument("--device", default="cpu", choices=("cpu", "paced"), help="vLLM's device")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="run only these contenders")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds per contender")
    args = parser.parse_args()
    groups = PACED_GROUPS if args.device == "paced" else GROUPS
    wanted = args.groups.split(",") if args.groups else [*groups]
    if unknown := {*wanted} - {*groups}:
        parser.error(f"no such groups on a {args.device} device: {', '.join(sorted(unknown))}")
    exit_on_sigterm()
    try:
        install_connector(prepare())
    except Skip as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    items: list[Item] = []
    missing: list[str] = []
    answers: Answers = {}
    for together in (each for group in wanted for each in groups[group]):
        names = [name for name in together if name in args.only.split(",")]
        items += measure_group(names, args, answers, missing)
    device = "" if args.device == "cpu" else f"{args.device} "
    for item in items:
        verdict = "ok" if item.holds else "short"
        print(f"{device + item.name:64} {item.found:>17} {item.wanted:>12} {verdict}")
    if missing:
        print(f"skipped: {', '.join(missing)}, see above")
        return SKIPPED
    return 0 if all(item.holds for item in items) else 1


def measure_group(
    names: Sequence[str],
    args: argparse.Namespace,
    answers: Answers,
    missing: list[str],
) -> list[Item]:
    """Start a group's contenders at the same time, and measure them.

    Args:
        names: the group's contenders.
        args: the command line's arguments.
        answers: answers of the very first contender, to which others are compared; extended.
        missing: extended by the names of contenders that can't run here.
    """
    loads = [int(clients) for clients in args.clients.split(",")]
    all_results = {shape: Results(shape) for shape in args.shapes.split(",")}
    with ExitStack() as stack:
        contenders = []
        for name in names:
            try:
                contenders.append(
                    stack.enter_context(
                        running(name, args.start_timeout, is_paced=args.device == "paced")
                    )
                )
            except Skip as reason:
                print(f"{name} is not available: {reason}", flush=True)
                missing.append(name)
        for contender in contenders:
            warm_up(contender, max(loads))
        for results in all_results.values():
            for number in range(args.rounds):
                measure_round(contenders, loads, number, results, answers, missing)
        for contender in contenders:
            if contender.name in OURS[:2] and (results := all_results.get("chat")) is not None:
                measure_hand_over(contender, results)
                measure_pace(contender, results)
    for results in all_results.values():
        show_stages(results)
        judge_all(results, loads)
    return [item for results in all_results.values() for item in results.items]


def show_stages(results: Results) -> None:
    """Print the time that a request spends in each stage of vLLM's pairs: medians over rounds."""
    for (name, clients), rows in results.rounds.items():
        found = [median(column) for column in zip(*(row.stages_ms for row in rows), strict=True)]
        if all(found):
            words = (f"{what} {ms:.0f} ms" for (what, _, _), ms in zip(STAGES, found, strict=True))
            print(f"{results.shape} {clients:2} clients {name:14} {', '.join(words)}", flush=True)


# ---------------------------------------------------------------- measuring


def warm_up(contender: Contender, clients: int) -> None:
    """Send requests that pay the one-time costs: handshakes, first use of memory, first shapes."""
    sizes = list(SHAPES.values())
    bodies = [
        request(500_000 + each, *reversed(sizes[each % len(sizes)]))
        for each in range(2 + 2 * clients)
    ]
    for batch in (bodies[:2], bodies[2:]):
        with ThreadPoolExecutor(len(batch)) as threads:
            list(threads.map(lambda body: ask(contender.url, body), batch))


def measure_round(
    contenders: list[Contender],
    loads: Sequence[int],
    number: int,
    results: Results,
    answers: Answers,
    missing: list[str],
) -> None:
    """Measure every contender at every load, one by one. If a pair with one of vLLM's own
    connectors stops responding, it is skipped from then on, with a message."""
    for clients in loads:
        for contender in tuple(contenders):
            try:
                key = results.shape, clients, number
                texts, figures = measure(contender, *key, answers.get(key))
            except OSError as exc:
                if contender.name not in PEERS:
                    raise
                print(f"{contender.name} dropped at {clients} clients: {exc}", flush=True)
                missing.append(contender.name)
                contenders.remove(contender)
                for load in loads:
                    results.rounds.pop((contender.name, load), None)
                continue
            answers.setdefault(key, texts)
            results.rounds.setdefault((contender.name, clients), []).append(figures)
            print(
                f"{results.shape} round {number} {clients:2} clients {contender.name:14} "
                f"{figures.tokens_per_s:7.1f} tok/s, TTFT {figures.ttft_p50_ms:6.1f} / "
                f"{figures.ttft_p99_ms:6.1f} ms, TPOT {figures.tpot_ms:5.2f} ms, EngineCore "
                f"{figures.core_cpu_ms:6.1f} ms a request, {figures.num_differing} differ",
                flush=True,
            )


def measure(
    contender: Contender, shape: str, clients: int, number: int, wanted: list[str] | None
) -> tuple[list[str], Figures]:
    """Measure one contender with as many concurrent requests as there are clients."""
    count = max(4, REQUESTS_PER_CLIENT * clients)
    num_in, num_out = SHAPES[shape]
    seeds = [1000 * clients + 100 * number + each for each in range(count)]
    bodies = [request(seed, num_out, num_in) for seed in seeds]
    cores = [pid for child in contender.processes for pid in engine_cores(child.pid)]
    stages, cpu, began = stages_s(contender), cpu_s(cores), time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        timings = list(threads.map(lambda body: ask(contender.url, body), bodies))
    elapsed = time.perf_counter() - began
    used = cpu_s(cores) - cpu
    first = sorted(timing.first_s for timing in timings)
    texts = [timing.text for timing in timings]
    differing = sum(a != b for a, b in zip(texts, wanted or texts, strict=True))
    return texts, Figures(
        count * num_out / elapsed,
        1e3 * median(first),
        1e3 * first[min(count - 1, int(count * 0.99))],
        1e3 * median(timing.tpot_s for timing in timings),
        1e3 * used / count,
        differing,
        tuple(
            1e3 * (after - before) / count
            for before, after in zip(stages, stages_s(contender), strict=True)
        ),
    )


def stages_s(contender: Contender) -> tuple[float, ...]:
    """Seconds that all requests of a pair have spent in each stage so far; empty for a single vLLM
    and for our own engine."""
    if contender.prefill == contender.decode:
        return (0.0,) * len(STAGES)
    urls = {"prefill": contender.prefill, "decode": contender.decode}
    return tuple(
        sum(figure(urls[role], f"vllm:{name}_seconds_sum") for name in names)
        for _, role, names in STAGES
    )


def request(seed: int, num_out: int = NUM_OUT, num_in: int = NUM_IN) -> Json:
    """A request with a new prompt, which is in no cache."""
    body = completion(tokens(num_in, seed), max_tokens=num_out, ignore_eos=True, stream=True)
    del body["return_token_ids"]
    return body


def ask(url: str, body: Json) -> Timing:
    """Send a streaming request; returns its timing."""
    began, first, last, text = time.perf_counter(), 0.0, 0.0, ""
    for now, choice in timed_choices(url, body):
        last = now - began
        first = first or last
        text += choice.get("text") or ""
    return Timing(first, last, text, body["max_tokens"])


def engine_cores(pid: int) -> list[int]:
    """Process ids of the EngineCores below a process."""
    return [each for each in family(pid) if "EngineCore" in title(each)]


def cpu_s(pids: Sequence[int]) -> float:
    """User and system time so far of processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def measure_hand_over(contender: Contender, results: Results) -> None:
    """Compare D's TTFT with transferred KV and with locally cached KV.

    In both cases D computes only the one token after the full blocks.
    """
    arriving, present = [], []
    for seed in range(12):
        body = prefilled(contender, request(seed=90_000 + seed, num_out=2))
        arriving.append(ask(contender.decode, body).first_s)
        present.append(ask(contender.decode, without_transfer(body)).first_s)
    bound = HAND_OVER_MS + NUM_STEPS * median_tpot(contender)
    found = 1e3 * (median(arriving[2:]) - median(present[2:]))
    name = f"{contender.name}: KV transfer at one client, beyond a prefix hit"
    results.judge(name, f"{found:.1f} ms", f"<= {bound:.1f} ms", found <= bound)


def measure_pace(contender: Contender, results: Results) -> None:
    """D's TPOT while it loads KV, relative to a stream alone, and to the same requests with KV
    cached.

    Ten loads per second, or ten prefix hits. P, which may share the cores, holds prompts during all
    of it.
    """
    turns: list[Turn] = []
    for number in range(PACE_STREAMS):
        loads = [
            prefilled_prompts(contender, (TURNS_PER_STREAM + 1) * number + each)
            for each in range(TURNS_PER_STREAM + 1)
        ]
        turns += measure_turns(
            contender.decode,
            request(99_000, num_out=PACE_TOKENS),
            loads[:-1],
            partial(ask, contender.decode),
            without_transfer,
        )
        for body in loads[-1]:
            ask(contender.decode, body)
    for by in (BY_ITSELF, HITS):
        found = ratio_of(turns, LOADS, by)
        name = f"{contender.name}: TPOT of D while loads run, by {by}"
        results.judge(name, str(found), f"<= {WANTED_TPOT}", found.median <= WANTED_TPOT)


def prefilled_prompts(contender: Contender, number: int) -> list[Json]:
    """Requests whose prompts P has computed and D has never seen."""
    first = 95_000 + REQUESTS_PER_WINDOW * number
    seeds = range(first, first + REQUESTS_PER_WINDOW)
    return [prefilled(contender, request(seed, num_out=1)) for seed in seeds]


def prefilled(contender: Contender, body: Json) -> Json:
    """Compute a prompt on P; returns the request that a proxy then sends to D: the prompt and P's
    token, with P's ``kv_transfer_params``."""
    asked = body | {"max_tokens": 1, "stream": False}
    answer = post(
        contender.prefill, COMPLETIONS, asked | {"kv_transfer_params": {"do_remote_decode": True}}
    )
    params = answer["kv_transfer_params"] | {"first_token_delivered": True}
    return body | {
        "prompt": [*body["prompt"], params["last_token_id"]],
        "kv_transfer_params": params,
    }


def without_transfer(body: Json) -> Json:
    """The same request without ``kv_transfer_params``, for an instance that has the KV."""
    return {key: value for key, value in body.items() if key != "kv_transfer_params"}


def median_tpot(contender: Contender) -> float:
    """Median TPOT of D in milliseconds, one stream at a time."""
    timings = [ask(contender.decode, request(99_000)) for _ in range(6)]
    return 1e3 * median(timing.tpot_s for timing in timings[1:])


# ---------------------------------------------------------------- judging


def judge_all(results: Results, loads: Sequence[int]) -> None:
    """Add one item per bound."""
    names = {name for name, _ in results.rounds}
    for clients in loads:
        for name in OURS:
            if name in names and THEIRS in names:
                judge_beside_theirs(results, name, clients)
        if {"one engine", "engine pair"} <= names:
            found = results.ratio("engine pair", "one engine", clients, "tokens_per_s")
            results.judge(
                f"{clients} clients, our engine as P and D by one of it: tok/s",
                f"{found:.2f}",
                f">= {WANTED_OF_ENGINE}",
                found >= WANTED_OF_ENGINE,
            )
    for name in sorted(names & {*OURS}):
        differing = sum(
            row.num_differing for (who, _), rows in results.rounds.items() if who == name
            for row in rows
        )  # fmt: skip
        results.judge(f"{name}: answers that differ", str(differing), "0", differing == 0)


def judge_beside_theirs(results: Results, name: str, clients: int) -> None:
    """Add the items that compare ours with vLLM's Mooncake connector at one load."""
    speed = results.ratio(name, THEIRS, clients, "tokens_per_s")
    results.judge(
        f"{clients} clients, {name} by {THEIRS}: tok/s",
        f"{speed:.2f}",
        f">= {WANTED_SPEED_UP}",
        speed >= WANTED_SPEED_UP,
    )
    cpu = results.ratio(name, THEIRS, clients, "core_cpu_ms")
    results.judge(
        f"{clients} clients, {name} by {THEIRS}: EngineCore CPU", f"{cpu:.2f}", "<= 1", cpu <= 1
    )


if __name__ == "__main__":
    sys.exit(main())
