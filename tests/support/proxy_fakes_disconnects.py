"""A client that disconnects at a given stage of its request, and how soon both instances notice."""

from __future__ import annotations

import asyncio

from support.proxy_fakes import fake_deployment, word
from support.proxy_fakes_client import STREAM, send_raw

# (flow, where the request waits, what the proxy counts it as). In the gap P has answered and D not
# begun; in the meeting D waits for a P that is at work.
STAGES = [
    ("pull", "prefill", "prefill"),
    ("pull", "gap", "decode"),
    ("pull", "decode", "decode"),
    ("push", "meeting", "decode"),
    ("push", "decode", "decode"),
]


async def disconnect(flow: str, stage: str, counted_as: str) -> float:
    """Seconds from the disconnect until every instance that works on the request is notified."""
    async with fake_deployment(flow=flow) as s:
        waiting_at = s.prefill if stage in {"prefill", "meeting"} else s.decode
        if stage == "decode":
            s.decode.behaviour.hang_after = 2
        else:
            waiting_at.behaviour.hangs = True
        reader, writer = await send_raw(s, STREAM)
        await waiting_at.wait_for(lambda: bool(waiting_at.generated))
        if stage == "decode":
            await reader.readuntil(word(1).encode())
        began = asyncio.get_running_loop().time()
        writer.transport.abort()
        await waiting_at.wait_for(lambda: waiting_at.cut_off == ["abc"])
        if stage == "gap":
            await s.prefill.wait_for(lambda: s.prefill.released == ["p0:abc"])
        if stage == "meeting":
            await s.decode.wait_for(lambda: s.decode.cut_off == ["abc"])
        elapsed = asyncio.get_running_loop().time() - began
        await asyncio.sleep(0)
        assert all(instance.num_running == 0 for instance in s.app.router.pool)
        assert s.count("disconnects", counted_as) == 1
        assert not s.app.router.metaserver.sessions
        return elapsed
