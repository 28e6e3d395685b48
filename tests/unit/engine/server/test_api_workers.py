"""The parent of API workers never waits for one of them, nor for the port that they share."""

from __future__ import annotations

import subprocess
import threading
from multiprocessing.connection import Pipe

import pytest
from support.ports import left_port

from mooncake_engine.errors import PortInUse
from mooncake_engine.server.api_workers import AbortEverywhere, _Worker, bind_all


def test_a_worker_that_reads_nothing_does_not_block_its_parent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = Pipe()
    with subprocess.Popen(["true"]) as process:
        worker = _Worker("api-0", process, ours)
        names = [f"request-{number}" for number in range(10_000)]

        def abort_all() -> None:
            for name in names:
                worker.send(AbortEverywhere(name))

        aborting = threading.Thread(target=abort_all, daemon=True)
        aborting.start()
        aborting.join(10.0)
        assert not aborting.is_alive()
        warnings = [record.getMessage() for record in caplog.records]
        assert warnings == ["api-0 reads no messages: dropped AbortEverywhere, 1 in all"]
        received = [theirs.recv() for _ in range(4096)]
        assert received == [AbortEverywhere(name) for name in names[:4096]]
        theirs.close()
        worker.close()


@pytest.mark.parametrize("reuse_port", [False, True], ids=["one process", "workers"])
def test_port_is_taken_over_at_once_and_belongs_to_one(*, reuse_port: bool) -> None:
    """After a predecessor with or without workers; before the workers listen, too."""
    port = left_port(reuse_port=reuse_port)
    sockets = bind_all("127.0.0.1", port, 3)
    assert {each.getsockname()[1] for each in sockets} == {port}
    with pytest.raises(PortInUse):
        bind_all("127.0.0.1", port, 3)
    for each in sockets:
        each.close()
