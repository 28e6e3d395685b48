"""A process without free descriptors fails only the peers that it can't connect to."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, os, resource
from mooncake_kv.errors import KVTransferError
from mooncake_kv.io_loop import raise_descriptor_limit
from mooncake_kv.protocol import LeaseReply, LeaseStatus, Done
from mooncake_kv.side_channel import SideChannelClient, SideChannelServer

def ask(client):
    return client.ask(lambda ticket: Done(ticket, "r", "me"), LeaseReply, try_timeout_s=5.0)

async def main():
    answer = lambda message: LeaseReply(message.ticket, LeaseStatus.RELEASED)
    server = await SideChannelServer.listen("127.0.0.1", [0], b"s", answer)
    connected = SideChannelClient("127.0.0.1", server.port, b"s")
    await ask(connected)
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    late = SideChannelClient("127.0.0.1", server.port, b"s")
    try:
        await ask(late)
    except KVTransferError as exc:
        print("late:", exc)
    await ask(connected)
    print("connected: fine")
    for descriptor in taken:
        os.close(descriptor)
    await ask(late)
    print("late: fine")
    connected.close("over"); late.close("over"); server.close()
    await asyncio.sleep(0.1)

soft, hard = 128, 512
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
asyncio.run(main())
raise_descriptor_limit()
print("limit:", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_without_descriptors_a_new_peer_fails_and_known_ones_continue() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    first, *rest = ended.stdout.splitlines()
    assert "Too many open files" in first
    assert "raise this instance's limit of descriptors" in first
    assert rest == ["connected: fine", "late: fine", "limit: 512"]
