"""Kills and freezes the processes of a vLLM pair with our connector: no answer may ever be wrong.

    python ci/test_vllm_faults.py [--flow pull,push] [--tp 2:1] [--pool] [--only freeze,worker]

P, D (vLLM's CPU build) and our proxy serve eight streams at a time, each with an uncached prompt.
In every phase (while P prefills, while KV is transferred, while D decodes), every process is killed
once, and stopped for a while and continued once: the API servers, EngineCores and workers of P and
D, and the proxy. A killed process is restarted with the same addresses and ids. Afterwards, every
stream must have ended with a single vLLM's answer, or with a prefix of it and an error; the
survivors must be healthy, no lease may be held, and all blocks must be free.

With ``--pool``, both also have the pool's connector in vLLM's MultiConnector, and a store in a
separate process, which is killed and stopped like the others. P has saved every second prompt to
the store beforehand, and D receives these requests directly. After each row, D must load what P
saves.

Finally tests expired leases whose blocks P has overwritten. vLLM's own NIXL connector is run for
comparison; its result is not checked.

Exits 0 if everything is as expected, 1 if not, 77 with "skipped: ..." and the reason if vLLM can't
run here.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vllm_environment import CACHE, DidNotStart, Skip, exit_status, install_connector
from vllm_multi_check import NOTHING_LEFT, POOL_LOADS, SAVING, multi_config
from vllm_pairs import answers_alone
from vllm_pool_check import CHUNK, LOADED, hook_errors
from vllm_requests import (
    COMPLETIONS,
    Stream,
    completion,
    figure,
    follow,
    post,
    tokens,
    until_zero,
)
from vllm_serving import (
    PROXY_LOG,
    Json,
    Launch,
    cores,
    family,
    free_port,
    nixl_variables,
    prepare,
    serving,
    start,
    start_proxy,
    stop,
    title,
    transfer_config,
    wait_until_healthy,
)

NUM_STREAMS = 8
NUM_TOKENS = 32
LENGTHS = (130, 256, 300, 390, 511, 640, 700, 900)
FROZEN_S = 8.0  # longer than a lease and than a transfer may take
STREAM_TIMEOUT_S = 150.0
"""Seconds within which every stream must end, on machines with other load."""
LEASE_S = 4
HEALTHY_S = 60.0
STAGGER_S = 0.02
"""Seconds between the starts of streams, about the duration of a load, so that they are at
different points of their transfers."""
FALLBACKS = "mooncake_proxy_local_prefill_total"
TARGETS = ("P api", "P core", "P worker", "D api", "D core", "D worker", "proxy")
STORE = "store"
PHASES = ("prefill", "transfer", "decode")
ACTIONS = ("kill", "freeze")
TITLES = {"core": "EngineCore", "worker": "Worker"}


def main() -> int:
    """Run the requested rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--flow", default="pull,push", help="pull, push or both")
    parser.add_argument("--tp", default="1:1", help="tensor-parallel ranks of P and of D")
    parser.add_argument("--pool", action="store_true", help="add a store, in MultiConnector")
    parser.add_argument("--only", default="", help="rows with all of these words")
    parser.add_argument("--short", action="store_true", help="run each row in one phase only")
    parser.add_argument("--no-leases", action="store_true", help="skip expired leases")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds for vLLM")
    args = parser.parse_args()
    return exit_status(partial(find_problems, args))


def find_problems(args: argparse.Namespace) -> list[str]:
    """Run the faults and the expired leases; returns the problems.

    Raises:
        Skip: vLLM can't run here.
    """
    python = prepare()
    install_connector(python)
    alone = answers_alone(python, args.start_timeout, questions())
    wanted = {name: answer["choices"][0]["text"] for name, answer in alone.items()}
    problems = []
    for flow in args.flow.split(","):
        problems += run_rows(python, flow, wanted, args)
    return problems if args.no_leases else problems + check_expired_leases(python, wanted, args)


def questions() -> dict[str, tuple[str, Json]]:
    """Paths and bodies of the requests, by name."""
    return {
        str(length): (COMPLETIONS, completion(tokens(length, 20), max_tokens=NUM_TOKENS))
        for length in LENGTHS
    }


def faults_log(role: str) -> Path:
    """Log file of the instance with that role."""
    return CACHE / f"vllm-faults-{role}.log"


def targets(args: argparse.Namespace) -> list[str]:
    """The processes to kill or freeze: of several ranks the last one, and the first one, whose
    output vLLM uses."""
    several = [size != "1" for size in args.tp.split(":")]
    first = [f"{name} first worker" for name, has in zip("PD", several, strict=True) if has]
    return [*TARGETS, *first, *([STORE] if args.pool else [])]


def rows(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Action, target process and phase of each row."""
    words = [word for word in args.only.replace(",", " ").split() if word]
    found = [
        (action, target, phase)
        for action in ACTIONS
        for target in targets(args)
        for phase in PHASES
    ]
    if args.short:
        found = [row for number, row in enumerate(found) if number // 3 % 3 == number % 3]
    return (row for row in found if all(word in " ".join(row) for word in words))


# ---------------------------------------------------------------- processes


@dataclass
class Part:
    """A vLLM instance, the proxy or the store; can be restarted with the same addresses and ids."""

    name: str
    url: str
    log: Path
    begin: Callable[[], subprocess.Popen[bytes]]
    child: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Port of its API."""
        return int(self.url.rpartition(":")[2])

    def start(self) -> None:
        """Start it."""
        self.child = self.begin()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is ready.

        Raises:
            DidNotStart: it is not ready in time, or has exited.
        """
        assert self.child is not None
        if self.name != STORE:
            wait_until_healthy(self.url, self.log, timeout_s, [self.child])
            return
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise DidNotStart(f"no process listens on {self.url}, see {self.log}")

    def stop(self) -> None:
        """Kill all of its remaining processes."""
        if self.child is not None:
            stop(self.child)

    def process(self, what: str) -> int:
        """The process id of its API server, EngineCore, last worker or first worker."""
        assert self.child is not None
        kind = TITLES.get(what.removeprefix("first "))
        if kind is None:
            return self.child.pid
        found = [pid for pid in family(self.child.pid) if kind in title(pid)]
        assert found, f"{self.name} has no {what}: {[title(p) for p in family(self.child.pid)]}"
        in_order = sorted(found, key=title)  # by rank, where there are several
        return in_order[0 if what.startswith("first ") else -1]


@dataclass
class Pair:
    """P, D, the proxy in front of them, optionally a store, and the problems so far."""

    flow: str
    parts: dict[str, Part]
    wanted: dict[str, str]
    timeout_s: float
    salt: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def has_pool(self) -> bool:
        """Whether P and D use a store."""
        return STORE in self.parts

    def url(self, name: str) -> str:
        """URL of P, D or the proxy."""
        return self.parts[name].url


@contextmanager
def running(
    python: Path, flow: str, wanted: dict[str, str], args: argparse.Namespace
) -> Iterator[Pair]:
    """Start everything, and wait until it is ready."""
    parts: dict[str, Part] = {}
    of_prefill, of_decode = map(int, args.tp.split(":"))
    timeout_s = args.start_timeout
    pool = start_pool(parts) if args.pool else None
    for name, role, core, tp_size in (
        ("P", "kv_producer", 0, of_prefill),
        ("D", "kv_consumer", 1, of_decode),
    ):
        log = faults_log(role)
        log.unlink(missing_ok=True)
        settings = {
            "lease_seconds": LEASE_S,
            "transfer_timeout_seconds": 6,
            "push_timeout_seconds": 30,
        }
        transfer = (
            transfer_config(role, flow, ["shm", "tcp"], **settings)
            if pool is None
            else multi_config((flow, "pool"), role, pool, **settings)
        )
        # A restarted instance keeps its engine id.
        transfer["engine_id"] = f"{name}-of-faults"
        launch = Launch(
            python,
            transfer,
            cores(core, tp_size),
            log,
            ("--max-num-batched-tokens", "256", "--tensor-parallel-size", str(tp_size)),
        )
        parts[name] = Part(name, launch.url, log, launch.start)
    PROXY_LOG.unlink(missing_ok=True)
    port = free_port()
    pools = parts["P"].url, parts["D"].url, port, flow, "--health-interval", "1"
    proxy = Part("proxy", f"http://127.0.0.1:{port}", PROXY_LOG, partial(start_proxy, *pools))
    parts["proxy"] = proxy
    with ExitStack() as stack:
        for part in parts.values():
            stack.callback(part.stop)
        for name in parts:
            parts[name].start()
            if name != "P":
                for other in parts.values():
                    if other.child is not None:
                        other.wait(timeout_s)
        yield Pair(flow, parts, wanted, timeout_s)


def start_pool(parts: dict[str, Part]) -> str:
    """Add a store; returns the pool option of the connector."""
    port, log = free_port(), faults_log(STORE)
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mooncake_kv", "store", "--dram", "256MiB"]
    begin = partial(start, [*command, "--port", str(port)], dict(os.environ), log)
    parts[STORE] = Part(STORE, f"tcp://127.0.0.1:{port}", log, begin)
    return f"connect=127.0.0.1:{port},chunk={CHUNK}"


# ---------------------------------------------------------------- rows


def bodies(pair: Pair) -> dict[str, Json]:
    """New request bodies for each row: a cache salt makes them uncached."""
    pair.salt += 1
    salt = f"{pair.flow} row {pair.salt}"
    return {name: body | {"cache_salt": salt} for name, (_, body) in questions().items()}


def run_rows(
    python: Path, flow: str, wanted: dict[str, str], args: argparse.Namespace
) -> list[str]:
    """Run all rows of one flow; returns the problems."""
    try:
        with running(python, flow, wanted, args) as pair:
            run_row(pair, "nothing", "", "decode")
            if pair.has_pool and not figure(pair.url("D"), POOL_LOADS):
                pair.problems.append(f"{flow}: D loads nothing from the store")
            for action, target, phase in rows(args):
                run_row(pair, action, target, phase)
    except DidNotStart as exc:
        return [f"{flow}: {exc}"]
    return pair.problems


def run_row(pair: Pair, action: str, target: str, phase: str) -> None:
    """Kill or freeze one process in one phase; prints the row and records problems."""
    name = f"{pair.flow} {action} {target}, {phase}"
    asked = bodies(pair)
    before = len(pair.problems)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        began = time.monotonic()
        streams = {prompt: Stream() for prompt in asked}
        ended = send(pair, phase, asked, streams, threads)
        restore = inject_fault(pair, action, target)
        wait(ended, timeout=max(1.0, STREAM_TIMEOUT_S - (time.monotonic() - began)))
        elapsed = time.monotonic() - began
        hung = sum(not each.done() for each in ended)
        restore()
        wait(ended, timeout=HEALTHY_S)
    judge(pair, name, streams, hung)
    check_recovery(pair, name)
    right = sum(not stream.error for stream in streams.values())
    verdict = "ok" if len(pair.problems) == before else "WRONG"
    print(
        f"{name:38} correct {right}, errors {len(streams) - right - hung}, hung {hung}, "
        f"{elapsed:5.1f} s {verdict}",
        flush=True,
    )


def send(
    pair: Pair,
    phase: str,
    asked: dict[str, Json],
    streams: dict[str, Stream],
    threads: ThreadPoolExecutor,
) -> list[Future[Stream]]:
    """Start eight streams; returns when the phase is reached."""
    started = threading.Event()
    stored = keep_in_store(pair, asked)
    url = pair.url("proxy")
    if phase == "transfer" and pair.flow == "pull":
        # Without the proxy, so that all prompts are prefilled before D loads any KV.
        held = [body for prompt, body in asked.items() if prompt not in stored]
        params = threads.map(lambda body: hold(pair.url("P"), body), held)
        for body, found in zip(held, list(params), strict=True):
            body["kv_transfer_params"] = found
        url = pair.url("D")
    ended = []
    for prompt, body in asked.items():
        asks = pair.url("D") if prompt in stored else url
        ended.append(threads.submit(follow, asks, body, streams[prompt], started, STREAM_TIMEOUT_S))
        if phase == "transfer":
            time.sleep(STAGGER_S)
    if phase == "decode":
        started.wait(STREAM_TIMEOUT_S)
    elif phase == "prefill":
        time.sleep(0.05)
    return ended


def keep_in_store(pair: Pair, asked: dict[str, Json]) -> set[str]:
    """Have P compute and save every second prompt, if there is a store; returns their names."""
    if not pair.has_pool:
        return set()
    prompts = list(asked)[1::2]
    for prompt in prompts:
        post(pair.url("P"), COMPLETIONS, asked[prompt] | {"max_tokens": 1})
    until_zero(pair.url("P"), SAVING)
    return set(prompts)


def hold(url: str, body: Json) -> Json:
    """Have P compute a prompt; returns its ``kv_transfer_params``."""
    extra = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    found: Json = post(url, COMPLETIONS, body | extra)["kv_transfer_params"]
    return found


def inject_fault(pair: Pair, action: str, target: str) -> Callable[[], None]:
    """Kill or stop a process; returns a function that restarts or continues it."""
    part_name, _, what = target.partition(" ")
    if action == "nothing":
        return lambda: None
    part = pair.parts[part_name]
    pid = part.process(what)
    if action == "kill":
        os.kill(pid, signal.SIGKILL)
        return lambda: restart(pair, part)
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(FROZEN_S, os.kill, (pid, signal.SIGCONT))
    timer.start()
    return timer.join


def restart(pair: Pair, part: Part) -> None:
    """Restart a killed part, after stopping its remaining processes."""
    part.stop()
    part.start()
    part.wait(pair.timeout_s)


def judge(pair: Pair, name: str, streams: dict[str, Stream], hung: int) -> None:
    """Check that every stream has ended, with correct text only."""
    for prompt, stream in streams.items():
        wanted = pair.wanted[prompt]
        is_right = wanted.startswith(stream.text) if stream.error else stream.text == wanted
        if not is_right:
            pair.problems.append(
                f"{name}: prompt of {prompt} has {stream.text!r:.80} ({stream.error}), wanted "
                f"{wanted!r:.80}"
            )
    if hung:
        pair.problems.append(f"{name}: {hung} streams did not end within {STREAM_TIMEOUT_S:.0f} s")


def check_recovery(pair: Pair, name: str) -> None:
    """Check that all parts are healthy and hold nothing, and that P and D both serve the next
    request."""
    for part in pair.parts.values():
        try:
            part.wait(HEALTHY_S)
        except Skip as exc:
            pair.problems.append(f"{name}: {exc}")
            return
    pair.problems += [f"{name}: {each}" for each in leftovers(pair)]
    prompt, body = next(iter(bodies(pair).items()))
    text, is_split = until_split(pair.url("proxy"), body)
    if text != pair.wanted[prompt]:
        pair.problems.append(f"{name}: afterwards {text!r:.120}")
    if not is_split:
        pair.problems.append(f"{name}: afterwards D computes prompts itself")
    if pair.has_pool and (wrong := until_loaded(pair)):
        pair.problems.append(f"{name}: afterwards {wrong}")


def leftovers(pair: Pair) -> Iterator[str]:
    """Resources that P and D still hold, and their failed hooks."""
    for who in ("P", "D"):
        for gauge in NOTHING_LEFT:
            if value := until_zero(pair.url(who), gauge):
                yield f"{who} has {gauge} {value}"
        if errors := figure(pair.url(who), "vllm:mooncake_hal_hook_errors_total"):
            yield f"{errors:g} hooks of {who} have failed"
        if pair.has_pool:
            yield from hook_errors(pair.url(who))


def until_split(proxy: str, body: Json) -> tuple[object, bool]:
    """Send requests until P takes part in one, or a timeout; returns the answer and whether it did.

    The proxy checks for recovered instances periodically, and until then D computes everything: the
    next row would kill a P that serves no requests.
    """
    deadline = time.monotonic() + HEALTHY_S
    while True:
        before = figure(proxy, FALLBACKS)
        answer = post(proxy, COMPLETIONS, body)
        is_split = "choices" in answer and figure(proxy, FALLBACKS) == before
        if is_split or time.monotonic() > deadline:
            return answer["choices"][0]["text"] if "choices" in answer else answer, is_split
        time.sleep(1)


def until_loaded(pair: Pair) -> str:
    """Wait until D loads a chunk that P saves; returns the problem, empty if none.

    An instance that lost its store reconnects periodically. Until then all lookups are misses,
    which answers don't reveal.
    """
    deadline = time.monotonic() + HEALTHY_S
    while True:
        prompt, body = next(iter(bodies(pair).items()))
        before = figure(pair.url("D"), LOADED)
        post(pair.url("P"), COMPLETIONS, body | {"max_tokens": 1})
        until_zero(pair.url("P"), SAVING)
        answer = post(pair.url("D"), COMPLETIONS, body)
        if "choices" not in answer or answer["choices"][0]["text"] != pair.wanted[prompt]:
            return f"D says {answer!r:.120} with the store"
        if figure(pair.url("D"), LOADED) > before:
            return ""
        if time.monotonic() > deadline:
            return "D loads nothing from the store"
        time.sleep(1)


# ---------------------------------------------------------------- leases


def check_expired_leases(
    python: Path, wanted: dict[str, str], args: argparse.Namespace
) -> list[str]:
    """Query D after P's lease has expired and its blocks were reused; returns the problems."""
    problems = []
    for connector in ("HalPullConnector", "NixlConnector"):
        try:
            right, errors, wrong = run_expired_leases(python, connector, wanted, args.start_timeout)
        except (Skip, OSError, KeyError) as exc:
            if connector.startswith("Hal"):
                raise
            print(f"expired lease, {connector}: not run: {exc!r:.200}")
            continue
        print(
            f"expired lease, {connector:16} correct {right}, errors {errors}, "
            f"wrong answers with HTTP 200 {wrong}",
            flush=True,
        )
        if connector.startswith("Hal") and wrong:
            problems.append(f"{wrong} wrong answers after an expired lease")
    return problems


def run_expired_leases(
    python: Path, connector: str, wanted: dict[str, str], timeout_s: float
) -> tuple[int, int, int]:
    """Numbers of right answers, errors, and wrong answers."""
    few = ("--num-gpu-blocks-override", "32", "--max-num-batched-tokens", "256")
    with ExitStack() as stack:
        pair = []
        for role, core in (("kv_producer", 0), ("kv_consumer", 1)):
            transfer = transfer_config(role, "pull", ["shm", "tcp"], lease_seconds=LEASE_S)
            variables = {}
            if connector == "NixlConnector":
                transfer = {"kv_connector": connector, "kv_role": role, "engine_id": role}
                transfer["kv_connector_extra_config"] = {"kv_lease_duration": 6}
                variables = nixl_variables()
            log = faults_log(role)
            pair.append(
                stack.enter_context(serving(python, transfer, cores(core), log, *few, **variables))
            )
        for vllm in pair:
            vllm.wait_until_healthy(timeout_s)
        prefill, decode = (vllm.url for vllm in pair)
        return query_after_expiry(prefill, decode, wanted)


def query_after_expiry(prefill: str, decode: str, wanted: dict[str, str]) -> tuple[int, int, int]:
    """Prefill, wait until the lease expires, overwrite P's blocks, then query D."""
    asked = {name: body for name, (_, body) in questions().items() if int(name) < 600}
    held = {name: hold(prefill, body) for name, body in asked.items()}
    time.sleep(12)
    for seed in range(12):
        post(prefill, COMPLETIONS, completion(tokens(1000, 50 + seed), max_tokens=1))
    right = errors = wrong = 0
    for name, body in asked.items():
        answer = post(decode, COMPLETIONS, body | {"kv_transfer_params": held[name]})
        if "choices" not in answer:
            errors += 1
        elif answer["choices"][0]["text"] == wanted[name]:
            right += 1
        else:
            wrong += 1
    return right, errors, wrong


if __name__ == "__main__":
    sys.exit(main())
