"""Instances that serve a random model over HTTP, and measurements of their streams.

Prompts are random token ids and all different, so that none is in the prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import uvloop
from support.figures import Figure
from support.paced_instances import proxied, ready
from support.speed_models import SpeedShape, read_rate, written_checkpoint
from support.streaming_client import StreamReader, steady_rate, stream_each

from mooncake_hal.backend import Backend
from mooncake_hal.testing.backends import load_backend

STREAMS: Mapping[int, tuple[int, int]] = {1: (512, 256), 32: (512, 512), 128: (256, 512)}
"""(prompt tokens, output tokens) by number of concurrent streams."""
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
READY_SECONDS = 300.0
"""Timeout of the start; a first start compiles kernels and captures graphs."""
NUM_FIRST_TOKENS = 20
"""Number of sequential requests that time to first token is measured with."""
SHARE_OF_LIMIT = 0.9
"""Required share of the tokens per second that reading weights and KV permits."""
_seeds = random.Random(1)


@dataclass(frozen=True)
class Served:
    """A model to serve.

    Args:
        shape: of the model.
        directory: of its checkpoint.
        backend: name.
    """

    shape: SpeedShape
    directory: Path
    backend: str

    @classmethod
    def make(cls, shape: SpeedShape, backend: Backend) -> Served:
        """Write the model's checkpoint unless it exists."""
        return cls(shape, written_checkpoint(shape, backend.name), backend.name)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of all streams' prompts and outputs, plus a tenth."""
        tokens = max(n * (sum(map(self.shape.length, of))) for n, of in STREAMS.items())
        return int(1.1 * tokens * self.shape.token_bytes)

    @contextmanager
    def instance(self, *more: str) -> Iterator[int]:
        """An instance on the first device; yields its port."""
        argv = ["serve", "--model", str(self.directory), "--port", "0", "--backend", self.backend]
        argv += ["--kv-cache-bytes", str(self.kv_bytes), "--max-num-seqs", str(max(STREAMS))]
        command = ["mooncake_engine.cli", *argv, "--swap-space", "0", *more]
        with ready(command, {}, timeout_s=READY_SECONDS) as (port, _):
            warm(port, self.shape)
            yield port

    @contextmanager
    def pair(self, flow: str) -> Iterator[int]:
        """A prefill and a decode instance on the first device, and a proxy; yields its port."""
        connectors = {"pull": "MooncakeConnector", "push": "MooncakeLayerwiseConnector"}
        options = ("--kv-connector", connectors[flow], "--async-scheduling")
        with (
            self.instance("--role", "prefill", *options) as prefill,
            self.instance("--role", "decode", *options) as decode,
            proxied(prefill, decode, "--flow", flow) as port,
        ):
            warm(port, self.shape)
            yield port

    def limit(self, num_streams: int) -> float:
        """Tokens per second that the first device's bandwidth permits."""
        prompt, answer = map(self.shape.length, STREAMS[num_streams])
        rate = bandwidth(self.backend, self.shape.copy_bytes)
        return num_streams / self.shape.step_seconds(rate, num_streams, prompt + answer // 2)


@lru_cache
def bandwidth(backend: str, nbytes: int) -> float:
    """Bytes per second that the first device reads; measured once, before anything is served."""
    return read_rate(load_backend(backend), nbytes)


@dataclass(frozen=True)
class StreamTimes:
    """Measurements of concurrent streams.

    Args:
        rate: tokens per second while all streams were running; if they never all were, over the
            whole time.
        overlapped: whether all streams ever ran at once.
        first_ms: time to first token of each stream.
        gaps_ms: time between two tokens, of all streams.
    """

    rate: float
    overlapped: bool
    first_ms: tuple[float, ...]
    gaps_ms: tuple[float, ...]

    @classmethod
    def of(cls, readers: list[StreamReader]) -> StreamTimes:
        times = [reader.times for reader in readers]
        first_ms = tuple(1e3 * (reader.times[0] - reader.began) for reader in readers)
        gaps_ms = tuple(1e3 * (b - a) for stream in times for a, b in pairwise(stream))
        seconds = max(stream[-1] for stream in times) - min(reader.began for reader in readers)
        steady = steady_rate(times)
        return cls(steady or sum(map(len, times)) / seconds, bool(steady), first_ms, gaps_ms)

    def __str__(self) -> str:
        first, gaps = (
            f"{_at(v, 50):.1f} / {_at(v, 99):.1f}" for v in (self.first_ms, self.gaps_ms)
        )
        apart = "" if self.overlapped else "never all at once, "
        return f"{apart}TTFT p50 / p99 {first} ms, ITL {gaps} ms"

    def figure(self, name: str, wanted: float | None, context: str = "") -> Figure:
        """The tokens per second as a figure, with the times as context."""
        shown = f"{self}; {context}" if context else str(self)
        return Figure(name, self.rate, wanted, "tokens/s", context=shown)


def _at(values: tuple[float, ...], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def run_streams(port: int, shape: SpeedShape, num_streams: int, sampling: str) -> StreamTimes:
    """Run that many concurrent streams."""
    prompt, answer = map(shape.length, STREAMS[num_streams])
    requests = [request_of(shape, prompt, answer, sampling) for _ in range(num_streams)]
    return StreamTimes.of(uvloop.run(stream_each(port, requests)))


def first_token_ms(port: int, shape: SpeedShape) -> float:
    """Time to first token of a single request: the median of sequential ones."""
    times = []
    for _ in range(NUM_FIRST_TOKENS):
        request = request_of(shape, shape.length(STREAMS[1][0]), 2, "greedy")
        [reader] = uvloop.run(stream_each(port, [request]))
        times.append(1e3 * (reader.times[0] - reader.began))
    return median(times)


def warm(port: int, shape: SpeedShape) -> None:
    """Send a few requests of each kind, so that first-time costs are not measured."""
    requests = [request_of(shape, shape.length(64), 8, how) for how in SAMPLINGS for _ in range(2)]
    uvloop.run(stream_each(port, requests))


def request_of(shape: SpeedShape, prompt: int, answer: int, sampling: str) -> dict[str, Any]:
    """A request with these lengths and a new prompt."""
    ids = _seeds.choices(range(300, shape.fields["vocab_size"]), k=prompt)
    fields = {"prompt": ids, "max_tokens": answer, "ignore_eos": True, "seed": len(ids)}
    return fields | dict(SAMPLINGS[sampling])
