"""Replays request traces on simulated clusters, and measures the latencies of live instances.

`mooncake-conductor` uses the same conductor as the proxy.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TextIO, TypeVar

from mooncake_conductor import __version__
from mooncake_conductor.argument_parser import CommandParser, DefaultsInHelp
from mooncake_conductor.calibration.live_instance import LiveInstance
from mooncake_conductor.calibration.measured_costs import (
    CalibrationPlan,
    calibrate,
    read_row,
    write_row,
)
from mooncake_conductor.calibration.serving_path import measure_path
from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import DEVICES, MODELS, cold_start, find
from mooncake_conductor.errors import ConductorError
from mooncake_conductor.policies.mooncake_policy import Boundary
from mooncake_conductor.policies.policy_names import DEFAULT_POLICY, POLICIES
from mooncake_conductor.replication import ReplicationRule
from mooncake_conductor.role_balance import RoleRule
from mooncake_conductor.simulator.report_page import Chart, Series, page, run_charts, svg_file
from mooncake_conductor.simulator.results import RunSummary, summarise, swing, table, write_csv
from mooncake_conductor.simulator.simulation import Cluster, Simulation, SimulationResult
from mooncake_conductor.simulator.systems import SYSTEMS, serve
from mooncake_conductor.simulator.trace_file import (
    TraceRequest,
    at_random,
    read_trace,
    replicated,
    scaled,
)
from mooncake_conductor.slo_admission import AdmissionMode, Objective, Objectives, objective

_BAR = 30
Number = TypeVar("Number", int, float)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    options = build_parser().parse_args(words, argparse.Namespace(words=words))
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT  # the shell's convention, without a traceback
    except (ConductorError, OSError) as exc:
        print(f"mooncake-conductor: {exc}", file=sys.stderr)
        return 1


def simulate(options: argparse.Namespace) -> int:
    """`simulate`: one run."""
    requests = _requests(options)
    result = _run(options, scaled(requests, options.load), Bar(options.policy))
    rows = [(options.policy, summarise(result, _objective(options)))]
    print(table(rows))
    print(swing(result).text)
    if options.csv is not None:
        write_csv(options.csv, result.records)
    if options.html is not None:
        _write(options, rows, run_charts(result))
    return 0


def compare(options: argparse.Namespace) -> int:
    """`compare`: policies × loads × cache sizes, each on the same requests."""
    requests = _requests(options)
    found: dict[tuple[str, float, int], RunSummary] = {}
    cells = list(product(options.caches, options.loads, options.policies))
    for number, (cache, load, policy) in enumerate(cells, 1):
        options.policy, options.cache_tokens = policy, cache
        name = f"{number}/{len(cells)}: {policy}, load {load:g}, cache {cache:,}"
        result = _run(options, scaled(requests, load), Bar(name))
        found[policy, load, cache] = summarise(result, _objective(options))
    rows = [
        (f"{policy}, load {load:g}, {cache / 1e6:g} M", summary)
        for (policy, load, cache), summary in found.items()
    ]
    print(table(rows))
    if options.html is not None:
        _write(options, rows, _comparison_charts(options, found))
    return 0


def goodput(options: argparse.Namespace) -> int:
    """`goodput`: systems × loads on the same nodes and requests."""
    requests, wanted, cluster = _requests(options), _objective(options), _cluster(options)
    cells = list(product(options.loads, options.systems))
    found: dict[tuple[str, float], RunSummary] = {}
    for number, (load, system) in enumerate(cells, 1):
        bar = Bar(f"{number}/{len(cells)}: {system}, load {load:g}")
        found[system, load] = serve(system, cluster, wanted, scaled(requests, load), bar)
        bar(1.0)
    print(table([(f"{system}, load {load:g}", row) for (system, load), row in found.items()]))
    lines = [
        Series(system, [(load, found[system, load].goodput) for load in sorted(options.loads)])
        for system in options.systems
    ]
    chart = Chart("Goodput", "times the trace's rate", "requests per second within SLO", lines)
    if options.svg is not None:
        options.svg.write_text(svg_file(chart))
    return 0


def calibrate_instance(options: argparse.Namespace) -> int:
    """`calibrate`: measure a live instance."""
    plan = CalibrationPlan(
        tuple(options.prompt_tokens),
        batches=tuple(options.batches),
        decode_context=tuple(options.decode_context),
        max_token_id=options.max_token_id,
        decode_tokens=options.decode_tokens,
    )

    def server(url: str) -> LiveInstance:
        return LiveInstance(url, api_key=options.api_key, model=options.served_model)

    instance = server(options.url)
    row = calibrate(options.name, instance, plan, Bar(f"{plan.num_requests} requests"))
    if options.through:
        row = measure_path(row, server(options.through), plan)
    for field in row.__struct_fields__:
        print(f"{field:24}{getattr(row, field)}")
    write_row(options.out, row)
    return 0


class Bar:
    """A progress bar; silent if the stream is not a terminal.

    Args:
        name: name of the run.
        stream: output; None: stderr.
    """

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self._name = name
        self._stream = sys.stderr if stream is None else stream

    def __call__(self, share: float) -> None:
        """Show the progress ``share``, 0 to 1."""
        if not self._stream.isatty():
            return
        filled = round(_BAR * share)
        bar = "█" * filled + "·" * (_BAR - filled)
        end = "\r\x1b[K" if share >= 1 else ""
        self._stream.write(f"\r\x1b[K{bar} {100 * share:3.0f} % {self._name}{end}")
        self._stream.flush()


def _run(options: argparse.Namespace, requests: list[TraceRequest], bar: Bar) -> SimulationResult:
    settings = ConductorSettings(
        options.policy,
        AdmissionMode(options.admission),
        Objectives(_objective(options)),
        options.threshold,
        Boundary(options.boundary),
        binds_late=options.binding == "late",
        replication=ReplicationRule() if options.replicate else None,
    )
    roles = RoleRule() if options.role_changes else None
    simulation = Simulation(_cluster(options), settings, seed=options.seed, roles=roles)
    result = simulation.run(requests, bar)
    bar(1.0)
    return result


def _cluster(options: argparse.Namespace) -> Cluster:
    shape = find(MODELS, options.model, "model")
    row = None if options.calibrated is None else read_row(options.calibrated)
    if row is None:
        latency = cold_start(options.model, options.device, options.devices_per_node)
    else:
        latency = row.latency
    return Cluster(
        options.prefill,
        options.decode,
        latency,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_layers=shape.num_layers,
        cache_tokens=options.cache_tokens,
        link_gb_s=options.link_gb_s,
        max_batch=options.max_batch,
        chunk_tokens=options.chunk_tokens,
        first_token_s=0.0 if row is None else row.first_token,
        hand_over_s=0.0 if row is None else row.hand_over,
        join_steps=0 if row is None else row.join_steps,
    )


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    found = read_trace(options.trace, chunk_tokens=options.chunk_tokens, is_delta=options.delta)
    found = found[: options.limit]
    if options.copies > 1:
        found = replicated(found, options.copies, random.Random(options.seed))
    if options.poisson is not None:
        return at_random(found, options.poisson, random.Random(options.seed))
    return found


def _objective(options: argparse.Namespace) -> Objective:
    return objective(options.slo_ttft, options.slo_tbt)


def _write(
    options: argparse.Namespace, rows: Sequence[tuple[str, RunSummary]], charts: Sequence[Chart]
) -> None:
    setting = " ".join(["mooncake-conductor", *options.words])
    options.html.write_text(page("mooncake-conductor simulate", rows, charts, setting))


def _comparison_charts(
    options: argparse.Namespace, found: dict[tuple[str, float, int], RunSummary]
) -> list[Chart]:
    """Charts over load (at the first cache size), and over cache size (at the first load)."""
    cache, load = options.caches[0], options.loads[0]

    def over_load(figure: Callable[[RunSummary], float]) -> list[Series]:
        loads = sorted(options.loads)
        return [
            Series(policy, [(at, figure(found[policy, at, cache])) for at in loads])
            for policy in options.policies
        ]

    caches = sorted(options.caches)
    hits = [
        Series(policy, [(at / 1e6, found[policy, load, at].hit_rate) for at in caches])
        for policy in options.policies
    ]
    of_load = "times the trace's rate"
    return [
        Chart("Goodput", of_load, "requests per second within SLO", over_load(_goodput)),
        Chart("Mean time to first token", of_load, "s", over_load(_mean_ttft)),
        Chart("Hit rate", "million tokens per node", "share of prompt tokens", hits),
    ]


def _goodput(summary: RunSummary) -> float:
    return summary.goodput


def _mean_ttft(summary: RunSummary) -> float:
    return summary.mean_ttft


def build_parser() -> argparse.ArgumentParser:
    """The command line of `mooncake-conductor`."""
    parser = CommandParser(prog="mooncake-conductor", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(
        name: str, text: str, run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name, help=text, description=text, formatter_class=DefaultsInHelp
        )
        added.set_defaults(run=run)
        return added

    one = command("simulate", "replay a trace on a modelled cluster", simulate)
    _add_common(one)
    _add_conductor(one)
    one.add_argument("--policy", choices=POLICIES, default=DEFAULT_POLICY, help="routing policy")
    one.add_argument(
        "--load",
        type=_positive,
        default=1.0,
        metavar="FACTOR",
        help="multiple of the trace's request rate",
    )
    _add_cache_tokens(one)
    one.add_argument("--csv", type=_output, metavar="FILE", help="write a line per request")
    _add_compare(command("compare", "policies, loads and cache sizes as one table", compare))
    systems = command("goodput", "goodput over load, compared with coupled instances", goodput)
    _add_common(systems)
    systems.add_argument(
        "--systems",
        type=_names(SYSTEMS, "system"),
        default=list(SYSTEMS),
        metavar="NAME,...",
        help=f"of {', '.join(SYSTEMS)} (default: all)",
    )
    _add_loads(systems)
    _add_cache_tokens(systems)
    systems.add_argument("--svg", type=_output, metavar="FILE", help="write the chart")
    _add_calibrate(
        command("calibrate", "measure the latencies of a live instance", calibrate_instance)
    )
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    _add_conductor(parser)
    parser.add_argument(
        "--policies",
        type=_names(POLICIES, "policy"),
        default=list(POLICIES),
        metavar="NAME,...",
        help=f"of {', '.join(POLICIES)} (default: all)",
    )
    _add_loads(parser)
    parser.add_argument(
        "--caches",
        type=_list_of(_count),
        default=[3_000_000],
        metavar="TOKENS,...",
        help="sizes of the prefix cache of a prefill node",
    )


def _add_loads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loads",
        type=_list_of(_positive),
        default=[1.0],
        metavar="FACTOR,...",
        help="multiples of the trace's request rate",
    )


def _add_cache_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-tokens",
        type=_count,
        default=3_000_000,
        metavar="TOKENS",
        help="size of the prefix cache of a prefill node",
    )


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    plan, add = CalibrationPlan(), parser.add_argument
    add("url", metavar="URL", help="an idle OpenAI-compatible server, http://HOST:PORT")
    add(
        "--out",
        type=_output,
        default=Path("calibrated.json"),
        metavar="FILE",
        help="write the measured row, for --calibrated",
    )
    add("--name", default="measured", metavar="NAME", help="name of the measured row")
    meaning = "an idle proxy in front of it and of decode instances: measure the path through it"
    add("--through", default="", metavar="URL", help=meaning)
    meaning = "model to request (default: the first that the server lists)"
    add("--served-model", default="", metavar="NAME", help=meaning)
    add("--api-key", default="", metavar="KEY", help="sent as a bearer token")
    for flag, default, unit, meaning in (
        ("--prompt-tokens", plan.prompt_tokens, "TOKENS,...", "lengths of prompts"),
        ("--batches", plan.batches, "N,...", "requests that decode concurrently"),
        ("--decode-context", plan.decode_context, "TOKENS,...", "lengths of their prompts"),
    ):
        add(flag, type=_list_of(_count), default=list(default), metavar=unit, help=meaning)
    for flag, count, unit, meaning in (
        (
            "--decode-tokens",
            plan.decode_tokens,
            "TOKENS",
            "length of each answer; more if answers don't overlap",
        ),
        ("--max-token-id", plan.max_token_id, "ID", "token ids of prompts are drawn below this"),
    ):
        add(flag, type=_count, default=count, metavar=unit, help=meaning)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="JSON lines as Mooncake publishes them")
    for flag, count, unit, meaning in (
        ("--prefill", 8, "N", "prefill nodes"),
        ("--decode", 8, "N", "decode nodes"),
        ("--devices-per-node", 8, "N", "devices of a node, which hold one copy of the model"),
        ("--max-batch", 256, "N", "sequences in the decode batch of a node"),
        ("--chunk-tokens", 512, "TOKENS", "tokens per hash id of the trace"),
        ("--copies", 1, "N", "replicate the trace's users this many times"),
    ):
        add(flag, type=_count, default=count, metavar=unit, help=meaning)
    add("--model", choices=MODELS, default="llama-3-70b", help="model whose costs are used")
    add("--device", choices=DEVICES, default="A800", help="device whose costs are used")
    add("--calibrated", type=Path, metavar="FILE", help="result of calibrate, replaces --device")
    meaning = "network bandwidth of a node"
    add("--link-gb-s", type=_positive, default=50.0, metavar="GB/S", help=meaning)
    for flag, limit, example, meaning in (
        ("--slo-ttft", "30000", "10x", "time to first token"),
        ("--slo-tbt", "100", "5x", "time between tokens"),
    ):
        meaning = f"objective: {meaning}, or a multiple of the unloaded one, such as {example}"
        add(flag, default=limit, metavar="MS", help=meaning)
    add("--delta", action="store_true", help="later turns of a session contain only new tokens")
    meaning = "Poisson arrivals, this many requests per second, instead of the trace's times"
    add("--poisson", type=_positive, metavar="RATE", help=meaning)
    meaning = "use only the first requests of the trace"
    add("--limit", type=_count, metavar="N", help=meaning)
    add("--seed", type=int, default=0, metavar="N", help="seed of the random numbers")


def _add_conductor(parser: argparse.ArgumentParser) -> None:
    """Options of the conductor, for commands that don't compare it with other systems."""
    add = parser.add_argument
    modes = [mode.value for mode in AdmissionMode]
    meaning = "refuse requests that would miss their objectives: never, at arrival by the prefill "
    meaning += "load and after the prefill by the decode load (baseline), by both at arrival "
    meaning += "(early), or by the decode load expected at the end of the prefill (predictive)"
    add("--admission", choices=modes, default="none", help=meaning)
    meaning = "policy mooncake: fetch a prefix that is this many times as long on another node"
    add("--threshold", type=_positive, default=2.0, metavar="FACTOR", help=meaning)
    forms = [boundary.value for boundary in Boundary]
    meaning = "policy mooncake: published version that decides about exactly --threshold times"
    add("--boundary", choices=forms, default="fast", help=meaning)
    meaning = "choose the decode node at arrival or after the prefill"
    add("--binding", choices=["early", "late"], default="early", help=meaning)
    add("--replicate", action="store_true", help="copy hot chunks before they are requested again")
    add("--role-changes", action="store_true", help="switch roles of idle nodes when load shifts")
    add("--html", type=_output, metavar="FILE", help="write one page with charts")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, got {text}")
    return value


def _count(text: str) -> int:
    value = _number(text)
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(value)


def _output(text: str) -> Path:
    """Parse the path of a file to write. A run may take minutes, so its folder is checked first."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"can't write {path}: there is no folder {path.parent}")
    return path


def _list_of(read: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    def read_list(text: str) -> list[Number]:
        return [read(part) for part in text.split(",")]

    return read_list


def _names(known: Mapping[str, object], kind: str) -> Callable[[str], list[str]]:
    def read_names(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            there_are = ", ".join(known)
            raise argparse.ArgumentTypeError(
                f"no {kind} {', '.join(unknown)}: there are {there_are}"
            )
        return names

    return read_names
