"""``mooncake-engine bench serve``: sends the same load as ``vllm bench serve`` to an OpenAI
endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.process.progress_bar import ProgressBar
from mooncake_engine.replay.latency_summary import Record
from mooncake_engine.replay.prompt_tokenizer import PromptTokenizer
from mooncake_engine.replay.replay_client import ExchangeFailed, ReplayClient, TargetServer
from mooncake_engine.replay.replay_command import AllRequestsFailed, ResultsNotWritten
from mooncake_engine.replay.serving_options import (
    CHAT_BACKENDS,
    dataset_of,
    headers_of,
    metadata_of,
    sampling_of,
    targets_of,
)
from mooncake_engine.replay.serving_result import DETAILS, serving_result, serving_table
from mooncake_engine.replay.trace import TraceRequest
from mooncake_kv.io_loop import raise_descriptor_limit

_READY_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests are sent.

    Args:
        rate: requests per second; infinite to send all at once.
        burstiness: shape of the gamma distribution of the intervals; infinite for equal intervals.
        max_concurrency: the most requests in flight; None for no limit.
        ramp_up: ``linear`` or ``exponential`` growth of the rate; None for a constant rate.
        start_rate, end_rate: first and last rate of the ramp-up, in requests per second.
        seed: the seed of the random times.

    Raises:
        ConfigError: a value is out of range, or two options exclude each other.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up: str | None = None
    start_rate: int | None = None
    end_rate: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        named = (("request-rate", self.rate), ("burstiness", self.burstiness))
        for name, value in (*named, ("max-concurrency", self.max_concurrency)):
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} must be more than 0, got {value:g}")
        if self.ramp_up is None:
            return
        if not math.isinf(self.rate):
            raise ConfigError("--ramp-up-strategy and --request-rate exclude each other")
        start, end = self.start_rate, self.end_rate
        if start is None or end is None or not 0 <= start < end:
            raise ConfigError(
                "--ramp-up-strategy needs --ramp-up-start-rps below --ramp-up-end-rps, got "
                f"{start} and {end}"
            )
        if start == 0 and self.ramp_up == "exponential":
            raise ConfigError("--ramp-up-strategy exponential can't start from 0")

    def times_s(self, count: int) -> list[float]:
        """When each of ``count`` requests is sent, in seconds from the start. At a fixed rate the
        last one is sent after exactly ``count / rate`` seconds, as in vLLM."""
        numbers = random.Random(self.seed)
        times = list(accumulate(self._pause_s(i, count, numbers) for i in range(count)))
        if self.ramp_up is not None or times[-1] == 0:
            return times
        factor = count / self.rate / times[-1]
        return [factor * at_s for at_s in times]

    def _pause_s(self, index: int, count: int, numbers: random.Random) -> float:
        rate = self._rate_at(index / max(count - 1, 1))
        if math.isinf(rate):
            return 0.0
        if math.isinf(self.burstiness):
            return 1 / rate
        return numbers.gammavariate(self.burstiness, 1 / (rate * self.burstiness))

    def _rate_at(self, share: float) -> float:
        """The rate after a share of the requests. A linear ramp-up from 0 starts at 0.1 requests
        per second."""
        if self.ramp_up is None or self.start_rate is None or self.end_rate is None:
            return self.rate
        start, end = float(self.start_rate), float(self.end_rate)
        if self.ramp_up == "exponential":
            return start * float((end / start) ** share)
        return max(start + (end - start) * share, 0.1)


@dataclass(frozen=True, slots=True)
class ServingRun:
    """A load test of an endpoint.

    Args:
        requests: the requests, with their prompts.
        client: the client of the endpoint.
        traffic: determines when requests are sent.
        id_prefix: the prefix of the requests' ids.
    """

    requests: Sequence[TraceRequest]
    client: ReplayClient
    traffic: Traffic
    id_prefix: str = "bench-"

    async def warm_up(self, num_requests: int, ready_timeout_s: float) -> None:
        """Wait until the endpoint answers, then send the first request ``num_requests`` times.

        Args:
            num_requests: the number of warm-up requests.
            ready_timeout_s: how long to wait for the endpoint, in seconds; 0 does not wait.

        Raises:
            AllRequestsFailed: the endpoint did not answer within the timeout.
        """
        deadline = time.monotonic() + ready_timeout_s
        while ready_timeout_s:
            found = await self._ask(0, -1)
            if found.error is None:
                break
            if time.monotonic() > deadline:
                raise AllRequestsFailed(
                    f"the endpoint did not answer within {ready_timeout_s:g} s: {found.error}"
                )
            await asyncio.sleep(_READY_POLL_S)
        limit = self.traffic.max_concurrency
        in_flight = nullcontext() if limit is None else asyncio.Semaphore(limit)

        async def one(number: int) -> None:
            async with in_flight:
                await self._ask(0, -1 - number)

        await asyncio.gather(*(one(number) for number in range(num_requests)))

    async def run(self, bar: ProgressBar) -> tuple[list[Record], float]:
        """Send all requests; returns their records, in the order of the requests, and the duration
        in seconds."""
        times = self.traffic.times_s(len(self.requests))
        limit = self.traffic.max_concurrency
        in_flight = nullcontext() if limit is None else asyncio.Semaphore(limit)
        start, num_done = time.perf_counter(), 0

        async def one(index: int) -> Record:
            nonlocal num_done
            await asyncio.sleep(start + times[index] - time.perf_counter())
            async with in_flight:
                record = await self._ask(index, index)
            num_done += 1
            bar("requests", num_done / len(times))
            return record

        records = await asyncio.gather(*(one(index) for index in range(len(times))))
        return records, time.perf_counter() - start

    async def _ask(self, index: int, number: int) -> Record:
        request = self.requests[index]
        now = time.perf_counter()
        record = Record(number, now, request_id=f"{self.id_prefix}{number}")
        await self.client.ask(request.text or "", request.num_output, record)
        return record


def bench_serve(args: argparse.Namespace) -> str:
    """Send the load, write the result file if the options ask for one, and return the result as a
    table. The API key is read from ``OPENAI_API_KEY``.

    Raises:
        ConfigError: an option or the dataset is invalid; nothing was sent.
        ExchangeFailed, AllRequestsFailed: the endpoint does not answer.
        ResultsNotWritten: the disk is full.
    """
    raise_descriptor_limit()  # each request in flight has a connection
    return asyncio.run(_bench_serve(args))


async def _bench_serve(args: argparse.Namespace) -> str:
    targets, server = targets_of(args), _server(args)
    traffic = Traffic(
        args.request_rate,
        args.burstiness,
        args.max_concurrency,
        args.ramp_up_strategy,
        args.ramp_up_start_rps,
        args.ramp_up_end_rps,
        args.seed,
    )
    name, tokenizer_id = await _model(args, server)
    tokenizer = PromptTokenizer.load(tokenizer_id)
    requests = dataset_of(args).requests(tokenizer)
    setting = _setting(args, name, tokenizer_id)
    path = _result_path(args, setting)
    run = ServingRun(requests, _client(args, server, name), traffic, args.request_id_prefix)
    await run.warm_up(args.num_warmups, args.ready_check_timeout_sec)
    records, duration_s = await run.run(ProgressBar())
    if all(record.error is not None for record in records):
        raise AllRequestsFailed(f"all requests failed; the first with: {records[0].error}")
    _count_unreported(requests, records, tokenizer)
    result = serving_result(records, duration_s, targets)
    table = serving_table(result, targets, setting)
    if path is not None:
        omitted = () if args.save_detailed else DETAILS
        try:
            _save(path, setting | result, omitted, appends=args.append_result)
        except OSError as exc:
            raise ResultsNotWritten(path, exc, table) from exc
    return table


def _count_unreported(
    requests: Sequence[TraceRequest], records: Sequence[Record], tokenizer: PromptTokenizer
) -> None:
    """Fill in the lengths of answers whose endpoint reports no usage in streams, as vLLM does: the
    prompt's is the dataset's, the answer's that of its text."""
    for request, record in zip(requests, records, strict=True):
        if record.error is None and not record.num_output:
            record.num_input = request.num_input
            record.num_output = tokenizer.count("".join(record.pieces)) - tokenizer.num_added


def _server(args: argparse.Namespace) -> TargetServer:
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = (args.base_url or f"http://{host}:{args.port}").rstrip("/")
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return TargetServer(url, headers | headers_of(args), verifies_certificates=not args.insecure)


def _client(args: argparse.Namespace, server: TargetServer, name: str) -> ReplayClient:
    is_chat = args.backend in CHAT_BACKENDS
    if args.endpoint is not None and args.endpoint.endswith("chat/completions") != is_chat:
        raise ConfigError(
            f"--endpoint {args.endpoint} does not match --backend {args.backend}: chat endpoints "
            "need openai-chat"
        )
    ignores_eos = args.ignore_eos or args.dataset_name == "random"
    return ReplayClient(server, name, is_chat, ignores_eos, args.endpoint, fields=sampling_of(args))


class _Model(msgspec.Struct):
    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def _model(args: argparse.Namespace, server: TargetServer) -> tuple[str, str]:
    """The name of the model to request, and the model whose tokenizer counts tokens."""
    if args.model is not None:
        return args.served_model_name or args.model, args.tokenizer or args.model
    try:
        found = msgspec.json.decode(await server.get("/v1/models"), type=_Models).data
    except msgspec.DecodeError as exc:
        raise ExchangeFailed(f"{server.url}/v1/models is not a list of models: {exc}") from exc
    if not found:
        raise ExchangeFailed(f"{server.url}/v1/models lists no models: set --model")
    return args.served_model_name or found[0].id, args.tokenizer or found[0].root or found[0].id


def _setting(args: argparse.Namespace, name: str, tokenizer_id: str) -> dict[str, Any]:
    """The configuration of the run, under the keys of vLLM's result file."""
    is_unlimited = math.isinf(args.request_rate)
    setting = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model or name,
        "tokenizer_id": tokenizer_id,
        "num_prompts": args.num_prompts,
        **metadata_of(args),
        "request_rate": "inf" if is_unlimited else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy is not None:
        names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
        setting |= {name: getattr(args, name) for name in names}
    return setting


def _result_path(args: argparse.Namespace, setting: dict[str, Any]) -> Path | None:
    """The path of the result file; None for no file. Checked before the run, whose results would
    otherwise be lost."""
    if not (args.save_result or args.append_result):
        return None
    rate = f"{setting['request_rate']}qps"
    if args.ramp_up_strategy is not None:
        rate = (
            f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps}qps-{args.ramp_up_end_rps}qps"
        )
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = setting["model_id"].rstrip("/").split("/")[-1]
    name = f"{args.label or args.backend}-{rate}{limit}-{model}-{setting['date']}.json"
    directory = args.result_dir or Path()
    path = Path(directory / (args.result_filename or name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as exc:
        raise ConfigError(f"--result-dir: can't write {path}: {exc.strerror}") from exc
    return path


def _save(path: Path, result: dict[str, Any], omitted: Sequence[str], *, appends: bool) -> None:
    text = json.dumps({name: value for name, value in result.items() if name not in omitted})
    with path.open("a" if appends else "w", encoding="utf-8") as file:
        file.write(f"\n{text}" if file.tell() else text)
