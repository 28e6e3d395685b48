"""Attention libraries on a real device: each available one gives our kernels' results."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake_hal.backend import Backend
from mooncake_hal.errors import CapabilityError
from mooncake_hal.testing.backends_data import Case, Shape, make_case
from mooncake_hal.testing.backends_ops import assert_same, oracle
from mooncake_hal_cuda.attention_libraries import NAMES
from mooncake_hal_cuda.cuda_ops import CudaOps
from mooncake_hal_cuda.launch_tuning import Tuning

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]  # libraries warn
PROCESSORS = 132
LENGTHS = ((1, 700), (1, 33), (300, 700), (64, 64))


@pytest.fixture(params=[16, 256], ids=lambda size: f"blocks{size}")
def case(cuda: Backend, request: pytest.FixtureRequest) -> Iterator[Case]:
    shape = Shape("bfloat16", "LPBTH", 32, 8, 128, request.param)
    made = make_case(cuda, shape, LENGTHS)
    yield made
    made.kv.free()


@pytest.mark.parametrize("name", NAMES)
def test_library_gives_the_results_of_the_reference(cuda: Backend, case: Case, name: str) -> None:
    ops = CudaOps(Tuning(cuda.runtime.devices()[0].generation, PROCESSORS), name)
    arguments = (case.kv.key, case.kv.value, case.batch, 0.088)
    decodes = case.batch.num_decodes
    try:
        found = ops.prefill_attention(case.query[decodes:], *arguments)
        decoded = ops.decode_attention(case.query[:decodes], *arguments)
    except CapabilityError as exc:
        pytest.skip(str(exc))
    assert_same(found, oracle.prefill_attention(case.query[decodes:], *arguments), "bfloat16")
    assert_same(decoded, oracle.decode_attention(case.query[:decodes], *arguments), "bfloat16")
