"""The example's chip, an emulated GPU, an emulated NPU and a CPU: KV goes from each to each."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.emulated_devices import KINDS, mychip
from support.mixed_fleet import Side, ask_across, check_idle, start_all, write_mixed_model
from support.npu import clear_cases, cpu

LENGTH = 150
FLEETS = [
    ("pull", "llama", None),
    ("push", "mla", [("mychip", "npu")]),
]
"""The KV flow, the model, and the pairs of device kinds; None means all pairs."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("how", "family", "pairs"), FLEETS, ids=str)
def test_every_pair_gives_tokens_of_cpu(
    tmp_path: Path, how: str, family: str, pairs: list[tuple[str, str]] | None
) -> None:
    """Blocks of 128 tokens on P and of 16 on D, where the device supports them."""
    kinds = KINDS | {"mychip": mychip(tmp_path)}
    pairs = pairs or list(itertools.product(kinds, kinds))
    prefills = {p: Side(p, 128) for p, _ in pairs}
    decodes = {d: Side(d, kinds[d].block_sizes[0]) for _, d in pairs}

    async def main() -> None:
        model = write_mixed_model(tmp_path, family)
        async with cpu(model) as on_cpu:
            cases = await clear_cases(on_cpu, range(LENGTH, LENGTH + len(pairs)))
        with ExitStack() as stack:
            wanted = [("prefill", side) for side in prefills.values()]
            wanted += [("decode", side) for side in decodes.values()]
            found = iter(start_all(stack, model, how, wanted, kinds))
            running_p, running_d = (
                {name: next(found) for name in of} for of in (prefills, decodes)
            )
            for (p, d), case in zip(pairs, cases, strict=True):
                tokens = await ask_across(running_p[p], running_d[d], how, case.prompt)
                assert tokens == case.tokens, f"{p} to {d}"
            for served in (*running_p.values(), *running_d.values()):
                await check_idle(served)
            for name, served in running_d.items():
                failures = await served.figure("mooncake:kv_transfer_load_failures")
                loads = await served.figure("mooncake:kv_transfer_loads_total")
                assert (failures, loads) == (0, sum(d == name for _, d in pairs)), name

    asyncio.run(main())
