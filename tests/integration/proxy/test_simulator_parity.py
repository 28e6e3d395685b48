"""The proxy places requests as the simulator does.

In virtual time, the simulator, and the proxy over instances that behave as its nodes, place every
request on the same instances, with the same reused prefixes and the same time to first token.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import pytest
from support.proxy_conductor import check_nothing_is_reserved, conductor_of, settings
from support.proxy_fakes import FakeDeployment
from support.simulated_instances import simulated_deployment
from support.virtual_time import run_virtually

from mooncake_conductor.conductor import ConductorSettings
from mooncake_conductor.cost.latency_model import MODELS, cold_start, find
from mooncake_conductor.index.holder_sets import Tier
from mooncake_conductor.index.prompt_keys import CHUNK_TOKENS, token_keys
from mooncake_conductor.simulator.simulation import Cluster, Simulation
from mooncake_conductor.simulator.trace_file import TraceRequest
from mooncake_proxy.config import CONDUCTOR_POLICIES
from mooncake_proxy.routing import conductor_fleet
from mooncake_proxy.routing.conductor_fleet import ConductorFleet

COSTS = "llama-3-8b:A100:1"
SHAPE = find(MODELS, "llama-3-8b", "model")
KV_TOKENS = 64 * 600
"""KV capacity of an instance in tokens: small enough that some prompts are evicted."""
LINK_GB_S = 12.5
SEED = 7
CLUSTER = Cluster(
    3,
    2,
    cold_start("llama-3-8b", "A100", 1),
    kv_bytes_per_token=SHAPE.kv_bytes_per_token,
    num_layers=SHAPE.num_layers,
    cache_tokens=KV_TOKENS,
    link_gb_s=LINK_GB_S,
    max_batch=8,
    kv_tokens=KV_TOKENS,
    chunk_tokens=CHUNK_TOKENS,
    cache_tier=Tier.DEVICE,
    decode_cache_tokens=KV_TOKENS,
    shares_prefixes=False,
)


@dataclass(frozen=True)
class PlannedRequest:
    """A request: arrival time, prompt, and number of output tokens."""

    at_s: float
    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class PlacedRequest:
    """The instances of a request, its reused prefix, and seconds to its first token."""

    prefill: str
    decode: str
    plan: str
    num_reused: int
    ttft: float


class RequestedLength:
    """Replaces the quantile of past output lengths: here both sides know every request's length."""

    value = 1e9

    def report(self, value: float) -> None:
        """Learn nothing."""


def _requests(count: int = 50, per_s: float = 16.0) -> list[PlannedRequest]:
    """Several concurrent conversations over four system prompts."""
    dice, at_s, asked = random.Random(3), 0.0, []
    systems = [[1000 + n] * 64 * dice.randrange(4, 20) for n in range(4)]
    histories: list[list[int]] = []
    for number in range(count):
        at_s += dice.expovariate(per_s)
        if not histories or dice.random() < 0.4:
            histories.append(list(dice.choice(systems)))
        history = dice.choice(histories)
        history += [10_000 + number] * dice.randrange(30, 900)
        asked.append(PlannedRequest(at_s, list(history), dice.randrange(2, 120)))
    return asked


def _simulated(asked: list[PlannedRequest], policy: str) -> list[PlacedRequest]:
    trace = [
        TraceRequest(each.at_s, len(each.prompt), each.num_output, token_keys(each.prompt))
        for each in asked
    ]
    chosen = ConductorSettings(policy=policy, binds_late=True)
    result = Simulation(CLUSTER, chosen, seed=SEED).run(trace)
    return [
        PlacedRequest(r.prefill, r.decode, r.plan, r.num_reused, r.ttft or 0.0)
        for r in result.records
    ]


async def _ask(s: FakeDeployment, number: int, each: PlannedRequest) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(each.at_s - loop.time())
    body = {"model": "m", "prompt": each.prompt, "max_tokens": each.num_output, "stream": True}
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {number}\r\n"
    head += f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + payload)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    assert b"[DONE]" in answer
    writer.close()


def _served(asked: list[PlannedRequest], policy: str) -> list[PlacedRequest]:
    placed = []

    async def main() -> None:
        chosen = settings(policy, costs=COSTS, kv_tokens=KV_TOKENS, max_batch=8)
        async with simulated_deployment(CLUSTER, **chosen) as s:
            routing = conductor_of(s)
            routing.pairs.conductor._rng.seed(SEED)
            await asyncio.gather(*(_ask(s, number, each) for number, each in enumerate(asked)))
            check_nothing_is_reserved(s)
            names = {fake.url: fake.name for fake in (*s.prefills, *s.decodes)}
            for number in range(len(asked)):
                routed = routing._records[str(number)]
                decision, outcome = routed.decision.prefill, routed.outcome
                placed.append(
                    PlacedRequest(
                        names[routed.names[decision.slot]],
                        names[routed.names[routed.decode_slot]],
                        decision.plan.value,
                        outcome["num_reused"],
                        outcome["prefilled_at"] - routed.decision.decided_at,
                    )
                )

    run_virtually(main(), has_sockets=True)
    return placed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", CONDUCTOR_POLICIES)
def test_proxy_places_as_the_simulator_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor_fleet, "RunningQuantile", lambda *args: RequestedLength())
    # The simulator's steps take the time that the model predicts.
    monkeypatch.setattr(ConductorFleet, "_measure_step", lambda *args: None)
    asked = _requests()
    simulated, served = _simulated(asked, policy), _served(asked, policy)
    differing = [
        (number, wanted, found)
        for number, (wanted, found) in enumerate(zip(simulated, served, strict=True))
        if (wanted.prefill, wanted.decode, wanted.plan, wanted.num_reused)
        != (found.prefill, found.decode, found.plan, found.num_reused)
    ]
    assert not differing, differing[:3]
    assert [p.ttft for p in served] == pytest.approx([p.ttft for p in simulated], abs=1e-6)
    # The load must leave the policy something to choose.
    assert len({p.prefill for p in served}) == CLUSTER.num_prefill
    assert len({p.decode for p in served}) == CLUSTER.num_decode
    assert max(p.ttft for p in served) > 2 * min(p.ttft for p in served)
