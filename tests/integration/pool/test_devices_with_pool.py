"""Emulated GPUs and NPUs and a CPU share one store: each loads what another has saved."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.mixed_fleet import write_mixed_model
from support.npu import cpu
from support.pool_grid import PoolSide, check_pair, make_case, start_sides
from support.store_process import StoreProcess


@pytest.mark.timeout(400)
def test_every_kind_of_device_writes_and_reads(tmp_path: Path) -> None:
    """Each device kind reads from its neighbour; ``make test-pool-grid`` covers all pairs, ranks,
    stages and models."""
    sides = [PoolSide.parse(text) for text in ("cpu/16", "cuda/128", "npu/128")]

    async def main() -> None:
        model = write_mixed_model(tmp_path, "llama")
        with ExitStack() as stack:
            store = StoreProcess(tmp_path, "--dram", "64M")
            stack.callback(store.end)
            instances = start_sides(stack, model, sides, store)
            async with cpu(model) as on_cpu:
                for writer, reader in zip(instances, instances[1:] + instances[:1], strict=True):
                    await check_pair(writer, reader, await make_case(on_cpu, (writer, reader)))

    asyncio.run(main())
