"""The tokens of the paced worker's device depend on every layer of the KV that its block table
names."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))  # not installed

from vllm_paced_worker import PacedDevice, PacedEvent, PacedStep, SignedKV

LAYERS, BLOCKS, BLOCK_SIZE, PROMPT = 3, 9, 8, 21
AT_P, AT_D = [2, 7, 4], [8, 1, 5]


@dataclass
class RunnerRequest:
    """The state that a model runner keeps of a request."""

    last_sampled: int = 0


class Instance:
    """KV memory and a device that computes the steps of one request."""

    def __init__(self, blocks: list[int]) -> None:
        self.memory = torch.zeros(LAYERS, BLOCKS, 2, BLOCK_SIZE, 8, dtype=torch.bfloat16)
        self.kv = SignedKV(list(self.memory))
        self.blocks, self.request = blocks, RunnerRequest()

    def run(self, start: int, tokens: list[int]) -> int:
        positions = np.arange(start, start + len(tokens))
        sampled, bounds = np.zeros((1, 1), np.int32), np.array([0, len(tokens)])
        step = PacedStep(
            self.kv,
            [self.request],
            np.array(tokens),
            positions,
            bounds,
            np.array([self.blocks]),
            sampled,
        )
        for layer in range(LAYERS):
            step.run(slice(layer, layer + 1))
        step.sample()
        return int(sampled[0, 0])

    def decode(self, start: int, tokens: list[int], count: int = 3) -> list[int]:
        """Tokens of the first step, then of steps whose input tokens the host does not know."""
        found = [self.run(start, tokens)]
        for position in range(PROMPT, PROMPT + count - 1):
            found.append(self.run(position, [-1]))
        return found


def prompt() -> list[int]:
    return [(7 * at) % 90 for at in range(PROMPT)]


def load(prefill: Instance, decode: Instance) -> None:
    decode.memory[:, decode.blocks] = prefill.memory[:, prefill.blocks]


def test_loaded_prompt_gives_tokens_of_single_instance() -> None:
    wanted = Instance(AT_P).decode(0, prompt())
    prefill, decode = Instance(AT_P), Instance(AT_D)
    prefill.run(0, prompt()[:10])
    assert prefill.run(10, prompt()[10:]) == wanted[0]
    load(prefill, decode)
    assert decode.decode(PROMPT - 1, prompt()[-1:]) == wanted


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("block", range(len(AT_D)))
@pytest.mark.parametrize("what", ["missing", "another layer's"])
def test_wrong_page_changes_answer(layer: int, block: int, what: str) -> None:
    wanted = Instance(AT_P).decode(0, prompt())
    prefill, decode = Instance(AT_P), Instance(AT_D)
    prefill.run(0, prompt())
    load(prefill, decode)
    page, other = (decode.memory[at % LAYERS, AT_D[block]] for at in (layer, layer + 1))
    page.copy_(torch.zeros_like(page) if what == "missing" else other.clone())
    assert decode.decode(PROMPT - 1, prompt()[-1:]) != wanted


def test_page_without_its_last_piece_changes_answer() -> None:
    wanted = Instance(AT_P).decode(0, prompt())
    prefill, decode = Instance(AT_P), Instance(AT_D)
    prefill.run(0, prompt())
    load(prefill, decode)
    decode.memory[1, AT_D[0], -1, -1, -1] = 0
    assert decode.decode(PROMPT - 1, prompt()[-1:]) != wanted


def test_event_waits_for_earlier_work() -> None:
    device, gate = PacedDevice(), threading.Event()
    done: list[str] = []
    device.enqueue(0.0, lambda: done.append("first") if gate.wait(10) else None)
    event = PacedEvent(device)
    event.record()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()
    assert done == ["first"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_for_failed_device_raises() -> None:
    device = PacedDevice()
    device.enqueue(0.0, lambda: 1 / 0)
    event = PacedEvent(device)
    event.record()
    with pytest.raises(RuntimeError, match="the paced device has failed") as caught:
        event.synchronize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
