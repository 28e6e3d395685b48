"""Offers more requests than a pool can serve, from clients that do not wait for each other, and
reports which were served and how fast."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from support.modelled_instances import modelled_deployment
from support.proxy_conductor import check_nothing_is_reserved, settings

from mooncake_conductor.cost.latency_model import LatencyModel
from mooncake_proxy.config import RequestClass

LATENCY = LatencyModel(0.2, 1e-3, 0.0, 0.02, 0.0, 0.0)
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 8
WARM_UP_REQUESTS = 16
PREFILL_S = LATENCY.prefill_seconds(PROMPT_TOKENS, 0)
TTFT_SLO_S, TBT_SLO_S = 3.0, 0.2


@dataclass
class OverloadReport:
    """What the clients observed; times in seconds."""

    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)
    refusal: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)
    num_cut: int = 0

    @property
    def attainment(self) -> float:
        """Share of the admitted requests that met both objectives."""
        pairs = zip(self.ttft, self.tbt, strict=True)
        met = sum(ttft <= TTFT_SLO_S and tbt <= TBT_SLO_S for ttft, tbt in pairs)
        return met / (len(self.ttft) + self.num_cut)

    def refused_within(self, share: float) -> float:
        """Seconds within which this share of the rejections arrived."""
        ordered = sorted(self.refusal)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _now() -> float:
    return asyncio.get_running_loop().time()


async def overload(seconds: float, factor: float, admission: str) -> OverloadReport:
    """Offer `factor` times the load that two P's can compute for `seconds`, at equal intervals."""
    report, numbers = OverloadReport(), count()
    capacity = 2 / PREFILL_S
    slo = RequestClass("default", f"{1000 * TTFT_SLO_S}", f"{1000 * TBT_SLO_S}")
    config = settings(admission=admission, default_class=slo)
    async with modelled_deployment(2, 2, LATENCY, **config) as s:
        for _ in range(WARM_UP_REQUESTS // 2):  # the proxy learns the instances' costs
            pair = (_ask(s.app.port, next(numbers), OverloadReport()) for _ in range(2))
            await asyncio.gather(*pair)
        began, tasks = _now(), []
        while (elapsed := _now() - began) < seconds:
            while len(tasks) < elapsed * capacity * factor:
                tasks.append(asyncio.ensure_future(_ask(s.app.port, next(numbers), report)))
            await asyncio.sleep(0.002)
        await asyncio.gather(*tasks)
        check_nothing_is_reserved(s)
    return report


async def _ask(port: int, number: int, report: OverloadReport) -> None:
    """One streamed request with a prompt of its own."""
    body = {"prompt": [number] * PROMPT_TOKENS, "max_tokens": OUTPUT_TOKENS, "stream": True}
    data = json.dumps(body).encode()
    began = _now()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        status = await reader.readline()
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.partition(b":")
            headers[name.lower()] = value.strip()
        if b" 429 " in status:
            error = json.loads(await reader.readexactly(int(headers[b"content-length"])))
            report.refusal.append(_now() - began)
            report.retry_after.append(int(headers[b"retry-after"]))
            report.codes[error["error"]["code"]] += 1
            return
        await _read_stream(reader, began, report)
    finally:
        writer.transport.abort()


async def _read_stream(reader: asyncio.StreamReader, began: float, report: OverloadReport) -> None:
    times = []
    async for line in reader:
        if line.startswith(b"data: {"):
            times.append(_now())
        if line.startswith(b"data: [DONE]"):
            report.ttft.append(times[0] - began)
            report.tbt.append((times[-1] - times[0]) / max(len(times) - 1, 1))
            return
    report.num_cut += 1
