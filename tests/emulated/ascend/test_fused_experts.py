"""Experts on several NPUs by torch-npu's dispatch and combine: each token gets the sum of its
experts, within the limits of each SoC family."""

from __future__ import annotations

import asyncio
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import torch_npu
from support.npu import FEW, ON_NPU, clear_cases, cpu
from support.pd import ask, instance, write_model
from torch import Tensor
from torch.nn.functional import silu

from mooncake_hal.backend import GroupSpec
from mooncake_hal.fused_experts import ExpertShape
from mooncake_hal.testing.backends import free_port, load_backend
from mooncake_hal_ascend.ascend_backend import AscendBackend
from mooncake_hal_ascend.soc import SOCS

INNER = 32
A2, A3 = (soc.fused_experts for soc in SOCS)


def weights_of(expert: int, hidden: int) -> tuple[Tensor, Tensor]:
    """An expert's weights: gate and up, [2 * inner, hidden], and down, [hidden, inner]."""
    generator = torch.Generator().manual_seed(expert)
    gate_up = torch.randn(2 * INNER, hidden, generator=generator) / hidden**0.5
    down = torch.randn(hidden, INNER, generator=generator) / INNER**0.5
    return gate_up.bfloat16(), down.bfloat16()


def expected(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    total = torch.zeros(x.shape)
    for token, (row, chosen) in enumerate(zip(x.float(), ids.tolist(), strict=True)):
        for place, expert in enumerate(chosen):
            gate_up, down = (each.float() for each in weights_of(expert, x.shape[1]))
            gate, up = (gate_up @ row).chunk(2)
            total[token] += weights[token, place] * (down @ (silu(gate) * up))
    return total


@pytest.mark.parametrize(
    ("family", "ranks", "shape"),
    [("A2", 16, ExpertShape(32, 3, 64)), ("A3", 8, ExpertShape(16, 2, 7168))],
)
def test_tokens_get_the_sums_of_their_experts_on_all_ranks(
    family: str, ranks: int, shape: ExpertShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has more tokens than the others, and some ranks have none. All tokens choose
    some of the last rank's experts; one rank's experts get no token."""
    monkeypatch.setenv("NPU_EMULATION_GENERATION", family)
    monkeypatch.setattr(torch_npu.npu, "device_count", lambda: ranks)
    meeting = f"tcp://127.0.0.1:{free_port()}"
    size = shape.num_slots // ranks

    backends = [AscendBackend() for _ in range(ranks)]

    def rank(number: int) -> tuple[Tensor, Tensor]:
        backend = backends[number]
        fused = backend.fused_experts(GroupSpec(number, ranks, meeting, 15.0), shape)
        assert fused is not None
        held = [weights_of(number * size + each, shape.hidden_size) for each in range(size)]
        packed = [
            backend.ops.pack_experts(torch.stack(each).to("npu"))
            for each in zip(*held, strict=True)
        ]
        tokens = (9, 0, 1, 4)[number % 4]
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(tokens, shape.hidden_size, generator=generator).bfloat16()
        scores = torch.rand(tokens, shape.num_slots, generator=generator)
        scores[:, -1], scores[:, :size] = 2.0, -1.0
        weights, ids = scores.topk(shape.chosen)
        arguments = ids.to("npu"), weights.to("npu")
        found = fused.run(x.to("npu"), packed[0], packed[1], *arguments, max_tokens=9)
        fused.close()
        assert found.dtype == x.dtype
        return found.cpu().float(), expected(x, ids, weights)

    with ThreadPoolExecutor(ranks) as threads:
        running = [threads.submit(rank, number) for number in range(ranks)]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        for each in done:
            found, wanted = each.result()
            torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.03)


@pytest.mark.parametrize(
    ("limits", "ranks", "shape", "reason"),
    [
        (A2, 8, ExpertShape(64, 8, 4096), "8 ranks, it takes 16, 32, 64"),
        (A3, 8, ExpertShape(64, 8, 4096), "rows of 4096, it takes up to 7168 and no others"),
        (A2, 16, ExpertShape(64, 8, 4100), "rows of 4100, it takes up to 7168 in steps of 32"),
        (A3, 16, ExpertShape(64, 9, 7168), "9 experts per token, it takes 8"),
        (A2, 16, ExpertShape(72, 8, 4096), "72 experts on 16 ranks, it takes up to 512, equally"),
        (A3, 16, ExpertShape(528, 8, 7168), "528 experts on 16 ranks"),
        (A2, 16, ExpertShape(400, 8, 4096), "25 experts per rank, it takes 24"),
    ],
)
def test_unsupported_sizes_are_reported_with_a_reason(
    limits: object, ranks: int, shape: ExpertShape, reason: str
) -> None:
    assert reason in str(limits.unsupported_reason(ranks, shape))  # type: ignore[attr-defined]
    for good in (ExpertShape(256, 8, 7168),):
        assert limits.unsupported_reason(16, good) is None  # type: ignore[attr-defined]


def test_largest_call_fits_in_the_buffer_of_a_group() -> None:
    """DeepSeek-V3 on 16 ranks, by the documentation's formulas."""
    shape, mib = ExpertShape(256, 8, 7168), 1 << 20
    assert A2.max_tokens(16, shape, 200 * mib) == 98 * mib // (16 * 8 * 7168 * 2)
    assert A3.max_tokens(16, shape, 200 * mib) == 99 * mib // (2 * 7296 * (256 + 9))
    assert (A2.max_tokens(16, shape, 4096 * mib), A3.max_tokens(16, shape, 8192 * mib)) == (
        256,
        512,
    )
    assert A2.max_tokens(16, shape, 4 * mib) == 0


def test_group_without_fused_experts_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    backend = load_backend("ascend")
    assert isinstance(backend, AscendBackend)
    assert backend.fused_experts(GroupSpec(0, 2, "", 1.0), ExpertShape(8, 2, 64)) is None
    assert "torch-npu's dispatch can't be used: 2 ranks, it takes 16, 32, 64" in caplog.text


def test_an_instance_over_eight_npus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Data-parallel ranks share experts, most without tokens; the answers are the CPU's."""
    monkeypatch.setenv("NPU_EMULATION_GENERATION", "A3")
    monkeypatch.setenv("NPU_EMULATION_DEVICES", "8")
    shape = {"hidden_size": 7168, "num_hidden_layers": 1, "num_experts": 16}
    model = write_model(tmp_path / "m", "qwen3_moe", dtype="bfloat16", **shape)
    divided = {**ON_NPU, "dp_size": 8, "ep_size": 8, "enforce_eager": True, "num_kv_blocks": 4}

    async def main() -> None:
        async with cpu(model) as on_cpu, instance(model, **divided) as on_npus:
            for case in await clear_cases(on_cpu, (100,)):
                assert (await ask(on_npus, case.prompt, FEW)).tokens == case.tokens

    asyncio.run(main())
    assert "dispatch can't be used" not in capfd.readouterr().err
