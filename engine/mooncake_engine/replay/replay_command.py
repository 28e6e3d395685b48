"""``mooncake-engine bench``: replays a trace against an OpenAI endpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from mooncake_engine.errors import ConfigError, EngineError
from mooncake_engine.process.progress_bar import ProgressBar
from mooncake_engine.replay.latency_summary import LatencyTargets, Record, UnloadedLatency
from mooncake_engine.replay.replay_client import ReplayClient, TargetServer
from mooncake_engine.replay.replay_page import page
from mooncake_engine.replay.replay_report import Report
from mooncake_engine.replay.trace import Pacing, PromptWriter, TraceRequest, read_trace
from mooncake_kv.io_loop import raise_descriptor_limit

_LEAD_S = 1.0
"""Seconds before a request's time at which its prompt is written: early enough to be ready, late
enough that not all prompts are in memory at once."""


class AllRequestsFailed(EngineError):
    """Every request of a replay failed."""


class ResultsNotWritten(EngineError):
    """The result file of a run can't be written, and the run's figures are in the message.

    Args:
        path: the file.
        cause: why.
        table: the run's figures.
    """

    def __init__(self, path: Path, cause: OSError, table: str) -> None:
        super().__init__(f"can't write {path}: {cause.strerror}; the run's figures were\n{table}")


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay of a trace against an endpoint.

    Args:
        requests: the trace's requests, with their lengths scaled.
        client: the client of the endpoint.
        writer: generates the prompts.
        pacing: determines when requests are sent.
    """

    requests: Sequence[TraceRequest]
    client: ReplayClient
    writer: PromptWriter
    pacing: Pacing

    async def run(self, bar: ProgressBar) -> list[Record]:
        """Send all requests; returns their records in the trace's order.

        Raises:
            AllRequestsFailed: all requests failed; the message has the first error.
        """
        times = self.pacing.times_s(self.requests)
        start = time.perf_counter() + _LEAD_S
        limit = self.pacing.concurrency
        in_flight = nullcontext() if limit is None else asyncio.Semaphore(limit)
        num_done = 0

        async def one(index: int) -> Record:
            nonlocal num_done
            async with in_flight:
                record = await self._ask(index, start + times[index])
            num_done += 1
            bar("replaying", num_done / len(times))
            return record

        records = await asyncio.gather(*(one(index) for index in range(len(times))))
        if all(record.error is not None for record in records):
            raise AllRequestsFailed(f"all requests failed; the first with: {records[0].error}")
        return records

    async def measure_unloaded(self, num_requests: int) -> UnloadedLatency:
        """Measure the latency of requests on an idle endpoint, one after another. Their lengths are
        spread over those of the trace; their prompts are unique, so that nothing is cached.

        Raises:
            AllRequestsFailed: a request failed.
        """
        by_length = sorted(self.requests, key=lambda request: request.num_input)
        count = min(num_requests, len(by_length))
        last = len(by_length) - 1
        chosen = [by_length[round(i * last / max(count - 1, 1))] for i in range(count)]
        records = []
        for number, request in enumerate([chosen[0], *chosen]):  # the first is a warm-up
            fresh = replace(request, block_ids=(), text=None)
            prompt = self.writer.write(fresh, -1 - number)
            record = Record(-1 - number, time.perf_counter())
            await self.client.ask(prompt, request.num_output, record)
            if record.error is not None:
                raise AllRequestsFailed(f"a request to the idle endpoint failed: {record.error}")
            records.append(record)
        return UnloadedLatency.of(records[1:])

    async def _ask(self, index: int, at_s: float) -> Record:
        """Send one request, at its time or immediately. A thread writes its prompt shortly
        before."""
        request = self.requests[index]
        await asyncio.sleep(at_s - time.perf_counter() - _LEAD_S)
        prompt = await asyncio.to_thread(self.writer.write, request, index)
        if self.pacing.concurrency is None:
            await asyncio.sleep(at_s - time.perf_counter())
        else:
            at_s = time.perf_counter()
        record = Record(index, at_s)
        await self.client.ask(prompt, request.num_output, record)
        return record


def scaled(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """The requests with their lengths multiplied by ``scale``, at least one token each."""
    return [
        replace(
            request,
            num_input=max(1, round(request.num_input * scale)),
            num_output=max(1, round(request.num_output * scale)),
            text=request.text if request.text is None else _shortened(request.text, scale),
        )
        for request in requests
    ]


def _shortened(text: str, scale: float) -> str:
    """The start of a text. Texts with a common prefix keep one."""
    return text[: max(1, round(len(text) * scale))]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    add = parser.add_argument
    add(
        "trace",
        type=Path,
        help="trace file: Mooncake's, L-Eval's or ArXiv-Summarization's JSON lines, or ShareGPT's "
        "JSON",
    )
    add("--url", required=True, metavar="URL", help="URL of the endpoint, with or without /v1")
    add("--model", required=True, metavar="NAME", help="model name to request")
    add("--chat", action="store_true", help="use /v1/chat/completions")
    add("--openai-only", action="store_true", help="do not send ignore_eos; outputs may end early")
    add("--num-requests", type=int, metavar="N", help="number of requests to send (default: all)")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="timeout of one request")
    add(
        "--out",
        type=Path,
        default=Path("bench"),
        metavar="OUT",
        help="write the results to OUT.json and OUT.html",
    )
    add(
        "--compare",
        type=Path,
        metavar="FILE",
        help="OUT.json of an earlier run, to show beside this one in OUT.html",
    )
    _add_load_options(parser)
    _add_objective_options(parser)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speedup",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="factor by which to divide the trace's times",
    )
    add(
        "--rate",
        type=float,
        metavar="PER_SECOND",
        help="send at random times (Poisson) at this rate, instead of the trace's times",
    )
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="keep N requests in flight, instead of following the trace's times",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the random times of --rate")
    add(
        "--length-scale",
        type=float,
        default=1.0,
        metavar="TIMES",
        help="factor by which to multiply prompt and output lengths",
    )
    add(
        "--block-tokens",
        type=int,
        default=512,
        metavar="TOKENS",
        help="tokens per hash id of the trace",
    )
    add(
        "--tokens-per-word",
        type=float,
        metavar="TOKENS",
        help="tokens per word of the generated prompts (default: measured at the endpoint)",
    )


def _add_objective_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--slo-ttft", type=float, metavar="MS", help="TTFT objective in ms")
    add(
        "--slo-tbt",
        type=float,
        metavar="MS",
        help="TBT objective in ms: mean of the longest tenth of a request's gaps",
    )
    for name in ("ttft", "tbt"):
        add(
            f"--slo-{name}-times",
            type=float,
            metavar="TIMES",
            help=f"{name.upper()} objective as a multiple of the latency on the idle endpoint, "
            "which is measured first",
        )
    add(
        "--unloaded-requests",
        type=int,
        default=8,
        metavar="N",
        help="requests to send one after another to measure the idle endpoint",
    )


def bench(args: argparse.Namespace) -> Report:
    """Replay the trace, write the result files, and return the report. The API key is read from
    ``OPENAI_API_KEY``.

    Raises:
        ConfigError: an option or the trace is invalid; nothing was sent.
        ExchangeFailed, AllRequestsFailed: the endpoint does not answer.
        ResultsNotWritten: the disk is full.
    """
    replay, objective = _replay(args), _objective(args)
    as_json, as_page = (_writable(f"{args.out}.{ending}") for ending in ("json", "html"))
    earlier = None if args.compare is None else Report.read(args.compare)
    raise_descriptor_limit()  # each request in flight has a connection
    report = asyncio.run(_run(args, replay, objective))
    files = ((as_json, report.json()), (as_page, page(report, earlier).encode()))
    for path, content in files:
        try:
            path.write_bytes(content)
        except OSError as exc:
            raise ResultsNotWritten(path, exc, report.table()) from exc
    return report


def _writable(name: str) -> Path:
    """The path of a result file. Checked before the replay, whose results would otherwise be
    lost."""
    path = Path(name)
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"--out: can't write {path}; choose a file in a writable directory")
    return path


async def _run(args: argparse.Namespace, replay: Replay, objective: LatencyTargets) -> Report:
    """Measure tokens per word and unloaded latency if they are needed, then replay."""
    found = args.tokens_per_word or await replay.client.tokens_per_word()
    replay = replace(replay, writer=replace(replay.writer, tokens_per_word=found))
    if objective.needs_unloaded:
        unloaded = await replay.measure_unloaded(args.unloaded_requests)
        objective = replace(objective, unloaded=unloaded)
    records = await replay.run(ProgressBar())
    return Report.of(_setting(args, found), records, objective)


def _replay(args: argparse.Namespace) -> Replay:
    names = ("num_requests", "length_scale", "block_tokens", "tokens_per_word", "timeout")
    for name in (*names, "unloaded_requests"):
        _check_positive(name, getattr(args, name))
    pacing = Pacing(args.speedup, args.rate, args.concurrency, args.seed)
    requests = scaled(read_trace(args.trace)[: args.num_requests], args.length_scale)
    pacing.times_s(requests)  # raises ConfigError before anything is sent
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    server = TargetServer(args.url.rstrip("/").removesuffix("/v1"), headers, timeout_s=args.timeout)
    writer = PromptWriter(block_tokens=max(1, round(args.block_tokens * args.length_scale)))
    return Replay(
        requests, ReplayClient(server, args.model, args.chat, not args.openai_only), writer, pacing
    )


def _objective(args: argparse.Namespace) -> LatencyTargets:
    for name in ("slo_ttft", "slo_tbt", "slo_ttft_times", "slo_tbt_times"):
        _check_positive(name, getattr(args, name))
    ttft_s, tbt_s = (None if ms is None else ms / 1000 for ms in (args.slo_ttft, args.slo_tbt))
    return LatencyTargets(ttft_s, tbt_s, args.slo_ttft_times, args.slo_tbt_times)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {value}")


def _setting(args: argparse.Namespace, tokens_per_word: float) -> dict[str, str]:
    pace = {"speedup": args.speedup, "rate": args.rate, "concurrency": args.concurrency}
    asked = [f"{name} {value:g}" for name, value in pace.items() if value not in (None, 1.0)]
    return {
        "trace": str(args.trace),
        "endpoint": args.url,
        "model": args.model,
        "pace": ", ".join(asked) or "the trace's own times",
        "lengths": f"times {args.length_scale:g}, {tokens_per_word:.2f} tokens per word",
    }
