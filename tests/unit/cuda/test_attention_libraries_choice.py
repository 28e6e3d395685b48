"""The choice of an attention library, from synthetic timings."""

from __future__ import annotations

import logging

import pytest

from mooncake_hal.errors import CapabilityError, HalError
from mooncake_hal_cuda import cuda_env
from mooncake_hal_cuda.attention_libraries import (
    AUTO,
    NAMES,
    OURS,
    LibraryChoice,
    LibraryChooser,
    LibraryTrial,
    choose_library,
)

TRIALS = [
    LibraryTrial(OURS, 1.0),
    LibraryTrial("sdpa", 0.8),
    LibraryTrial("varlen", None, "no pages of 16 tokens"),
]


def test_fastest_library_is_chosen_and_the_reason_names_all() -> None:
    assert choose_library(AUTO, TRIALS) == LibraryChoice(
        "sdpa", "triton: 1.000 ms; sdpa: 0.800 ms; varlen: no pages of 16 tokens"
    )


@pytest.mark.parametrize("milliseconds", [1.0, 0.95])
def test_our_kernel_is_chosen_unless_another_is_clearly_faster(milliseconds: float) -> None:
    assert (
        choose_library(AUTO, [LibraryTrial("sdpa", milliseconds), LibraryTrial(OURS, 1.0)]).name
        == OURS
    )


def test_requested_library_is_chosen_even_if_slower() -> None:
    assert (
        choose_library("sdpa", [LibraryTrial(OURS, 0.1), LibraryTrial("sdpa", 5.0)]).name == "sdpa"
    )


def test_unusable_requested_library_is_rejected() -> None:
    with pytest.raises(CapabilityError, match=r"ATTENTION=varlen .* no pages of 16 tokens"):
        choose_library("varlen", TRIALS)


def test_trials_run_once_per_shape_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []

    def tries() -> list[LibraryTrial]:
        made.append("")
        return TRIALS

    chooser = LibraryChooser(AUTO)
    assert chooser.pick("prefill", 1, None) == OURS  # a graph is being captured
    with caplog.at_level(logging.INFO):
        names = [chooser.pick("prefill", shape, tries) for shape in (1, 1, 2)]
    assert names == ["sdpa"] * 3
    assert len(made) == 2
    assert "prefill of 1 runs on sdpa: triton: 1.000 ms" in caplog.text
    assert chooser.pick("prefill", 1, None) == "sdpa"


def test_invalid_setting_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_HAL_CUDA_ATTENTION", raising=False)
    assert cuda_env.attention(NAMES) == AUTO
    monkeypatch.setenv("MOONCAKE_HAL_CUDA_ATTENTION", "cudnn")
    with pytest.raises(HalError, match="'cudnn' must be one of"):
        cuda_env.attention(NAMES)
