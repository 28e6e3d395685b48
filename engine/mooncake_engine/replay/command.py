"""The command line of ``mooncake-engine bench``."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path

from mooncake_engine.errors import ConfigError
from mooncake_engine.progress import ProgressBar
from mooncake_engine.replay.client import Client
from mooncake_engine.replay.http_client import Server
from mooncake_engine.replay.measure import Objective, Record
from mooncake_engine.replay.pacing import Pacing
from mooncake_engine.replay.page import page
from mooncake_engine.replay.prompts import PromptWriter
from mooncake_engine.replay.report import Report
from mooncake_engine.replay.run import Replay, scaled
from mooncake_engine.replay.trace import read_trace


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be said about a replay."""
    add = parser.add_argument
    add("trace", type=Path, help="Mooncake's JSON lines, or a ShareGPT file")
    add("--url", required=True, metavar="URL", help="of the endpoint; /v1 may be left out")
    add("--model", required=True, metavar="NAME", help="name to ask for")
    add("--chat", action="store_true", help="use /v1/chat/completions")
    add("--openai-only", action="store_true", help="leave ignore_eos out: answers may end early")
    add("--num-requests", type=int, metavar="N", help="from the trace's beginning (default: all)")
    add("--speedup", type=float, default=1.0, metavar="TIMES", help="divides the trace's times")
    add("--rate", type=float, metavar="PER_SECOND", help="requests, instead of the trace's times")
    add("--concurrency", type=int, metavar="N", help="so many at a time, instead of any times")
    add("--seed", type=int, default=0, metavar="N", help="of the times of --rate")
    add("--length-scale", type=float, default=1.0, metavar="TIMES", help="multiplies all lengths")
    add("--block-tokens", type=int, default=512, metavar="TOKENS", help="a hash id stands for")
    add(
        "--tokens-per-word",
        type=float,
        metavar="TOKENS",
        help="of our prompts (default: the endpoint is asked)",
    )
    add("--slo-ttft", type=float, metavar="MS", help="a good answer begins within that")
    add("--slo-tbt", type=float, metavar="MS", help="and its longest tenth of gaps averages that")
    add("--timeout", type=float, default=3600.0, metavar="SECONDS", help="for one answer")
    add(
        "--out",
        type=Path,
        default=Path("bench"),
        metavar="OUT",
        help="writes OUT.json and OUT.html",
    )


def bench(args: argparse.Namespace) -> Report:
    """Replay, write the files, and return what came of it. The API key is OPENAI_API_KEY's.

    Raises:
        ConfigError: a wrong option or trace; nothing was sent.
        ExchangeFailed, NothingAnswered: the endpoint does not answer.
    """
    replay, objective = _replay(args), _objective(args)
    as_json, as_page = (_writable(f"{args.out}.{ending}") for ending in ("json", "html"))
    records, tokens_per_word = asyncio.run(_run(replay, args.tokens_per_word))
    report = Report.of(_setting(args, tokens_per_word), records, objective)
    as_json.write_bytes(report.json())
    as_page.write_text(page(report), encoding="utf-8")
    return report


def _writable(name: str) -> Path:
    """Where a result goes. Looked at before the replay, whose figures would be lost after it."""
    path = Path(name)
    if not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ConfigError(f"--out: can't write {path}; name a file in a folder that can be written")
    return path


async def _run(replay: Replay, tokens_per_word: float | None) -> tuple[list[Record], float]:
    found = tokens_per_word or await replay.client.tokens_per_word()
    writer = replace(replay.writer, tokens_per_word=found)
    return await replace(replay, writer=writer).run(ProgressBar()), found


def _replay(args: argparse.Namespace) -> Replay:
    for name in ("num_requests", "length_scale", "block_tokens", "tokens_per_word", "timeout"):
        _check_positive(name, getattr(args, name))
    pacing = Pacing(args.speedup, args.rate, args.concurrency, args.seed)
    requests = scaled(read_trace(args.trace)[: args.num_requests], args.length_scale)
    pacing.times_s(requests)  # refuse before anything is sent
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    server = Server(args.url.rstrip("/").removesuffix("/v1"), headers, timeout_s=args.timeout)
    writer = PromptWriter(block_tokens=max(1, round(args.block_tokens * args.length_scale)))
    return Replay(
        requests, Client(server, args.model, args.chat, not args.openai_only), writer, pacing
    )


def _objective(args: argparse.Namespace) -> Objective:
    limits = []
    for name in ("slo_ttft", "slo_tbt"):
        value = getattr(args, name)
        _check_positive(name, value)
        limits.append(None if value is None else value / 1000)
    return Objective(*limits)


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
