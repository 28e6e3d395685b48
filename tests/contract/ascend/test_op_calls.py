"""Every call of torch-npu in the Ascend backend matches the schemas of every pinned version."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.op_schemas import Schemas, all_versions, check_source, count_calls

import mooncake_hal_ascend

PACKAGE = Path(mooncake_hal_ascend.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
NEWEST = all_versions()[-1]

RMS = "torch_npu.npu_rms_norm"
ATTEND = "torch_npu.npu_fused_infer_attention_score(q, k, v"


@pytest.mark.parametrize("schemas", all_versions(), ids=lambda schemas: schemas.version)
def test_backend_calls_match_schemas(schemas: Schemas) -> None:
    problems = {
        str(path.relative_to(PACKAGE)): found
        for path in SOURCES
        if (found := check_source(path.read_text(), schemas))
    }
    assert not problems


def test_backend_has_calls_to_check() -> None:
    assert sum(count_calls(path.read_text()) for path in SOURCES) >= 10


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("torch_npu.npu_rms_normal(x, w)", "has no op npu_rms_normal"),
        (f"{RMS}(x, w, eps=1e-6)", "unknown keyword 'eps'"),
        (f"{RMS}(x)", "missing ['gamma']"),
        (f"{RMS}(x, w, 1e-6, 1)", "takes 3 arguments by position, not 4"),
        (f"{RMS}(x, w, gamma=w)", "'gamma' is given twice"),
        (f"{RMS}(x, w, '1e-6')", "arguments ['epsilon'] are of the wrong type"),
        (f"{RMS}.backward(x, w)", "it has no overload backward"),
        (f"{ATTEND}, input_layout=3)", "arguments ['input_layout'] are of the wrong type"),
        (f"{ATTEND}, softmax_lse_flag=1)", "arguments ['softmax_lse_flag'] are of the wrong"),
        (f"{ATTEND}, actual_seq_lengths=['1'])", "['actual_seq_lengths'] are of the wrong type"),
        (f"{ATTEND}, num_heads=[1])", "['num_heads'] are of the wrong type"),
        (f"{ATTEND}, block_table=[])", "['block_table'] are of the wrong type"),
        ("torch.ops.npu.npu_rms_norm.default(x)", "missing ['gamma']"),
        ("torch.ops.atb._npu_reshape_and_cache(k, v, a, b)", "missing ['slot_indices']"),
        ("torch.npu.set_devices(0)", "has no torch.npu.set_devices"),
    ],
)
def test_mismatching_call_is_reported(call: str, problem: str) -> None:
    (found,) = check_source(f"\n{call}", NEWEST)
    assert found.startswith("line 2: ")
    assert problem in found


@pytest.mark.parametrize(
    "call",
    [
        f"{RMS}(x, w, epsilon=eps)",
        f"{RMS}(x, w, 1)",
        f"{RMS}(*both)",
        f"{RMS}(x, **rest)",
        f"{ATTEND}, actual_seq_lengths=[1, n], atten_mask=None, pre_tokens=-1)",
        "torch_npu.npu_fused_infer_attention_score.out(q, k, v, out=[o, l], workspace=w)",
        "torch.npu.set_device(0)",
        "self.npu_helper(1, 2, three=3)",
    ],
)
def test_matching_call_is_not_reported(call: str) -> None:
    assert check_source(call, NEWEST) == []
