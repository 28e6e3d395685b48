"""Scenarios of small all-reduces on the emulated device, with one process per rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from support.cuda_emulation import EmulatedCommunicator, emulated_library, emulated_sharing
from support.rank_processes import at_once
from support.triton_interpreter import repair
from triton.runtime import interpreter

from mooncake_hal.backend import GroupSpec
from mooncake_hal.testing.backends import free_port
from mooncake_hal_cuda import one_shot_all_reduce
from mooncake_hal_cuda.one_shot_all_reduce import CHUNK_BYTES, SmallAllReduce

Scenario = Callable[[EmulatedCommunicator], Any]
SIZES = (16, 3 * CHUNK_BYTES + 48, CHUNK_BYTES, 1024, 2 * CHUNK_BYTES, 16)
"""Message sizes of successive calls; not every program has work in all of them."""
TIMEOUT_S = 30.0


def on_ranks(world_size: int, scenario: Scenario, *lacks: str, timeout_s: float = 0) -> list[Any]:
    """Run a scenario on every rank; return each rank's result.

    Args:
        world_size: number of ranks.
        scenario: a module-level function.
        lacks: by rank, the features that its device lacks (EMULATED_CUDA_LACKS).
        timeout_s: how long an all-reduce waits for the other ranks; 0: the group's timeout.
    """
    meeting = f"tcp://127.0.0.1:{free_port()}"
    groups = [GroupSpec(rank, world_size, meeting, TIMEOUT_S) for rank in range(world_size)]
    missing = [*lacks, *[""] * (world_size - len(lacks))]
    pairs = zip(groups, missing, strict=True)
    return at_once([partial(_one, scenario, group, timeout_s, lack) for group, lack in pairs])


def _one(scenario: Scenario, group: GroupSpec, timeout_s: float, lacks: str) -> Any:
    repair()
    torch.set_num_threads(1)
    os.environ["EMULATED_CUDA_LACKS"] = lacks
    communicator = EmulatedCommunicator(group, 0, timeout_s)
    try:
        return scenario(communicator)
    finally:
        communicator.close()
        assert emulated_library().emulated_leftovers() == 0


def addends(world_size: int, dtype: torch.dtype, nbytes: int) -> list[torch.Tensor]:
    """Each rank's input. Bfloat16 inputs are whole numbers, because the interpreter truncates where
    a device rounds."""
    chance = torch.Generator().manual_seed(nbytes)
    shape = (world_size, nbytes // dtype.itemsize)
    if dtype == torch.bfloat16:
        return list(torch.randint(-9, 9, shape, generator=chance).to(dtype))
    return list(torch.randn(shape, generator=chance).to(dtype))


def in_rank_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the kernel's order of additions."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def sums(group: EmulatedCommunicator) -> None:
    """Sum messages of every type and changing sizes, exact to the bit, and every kind of view."""
    for dtype in one_shot_all_reduce.DTYPES:
        for nbytes in SIZES:
            parts = addends(group.world_size, dtype, nbytes)
            x, expected = parts[group.rank].clone(), in_rank_order(parts)
            assert group.small.reduce(group, x)
            assert torch.equal(x, expected)
            strided = torch.stack([parts[group.rank]] * 2, 1)[:, 0]
            assert group.small.reduce(group, strided)
            assert torch.equal(strided, expected)
            odd = torch.cat([torch.zeros(1, dtype=dtype), parts[group.rank]])[1:]
            assert odd.data_ptr() % 16
            assert group.small.reduce(group, odd)
            assert torch.equal(odd, expected)


def others_sizes(group: EmulatedCommunicator) -> list[bool]:
    """Which of these sizes the kernel supports; the group also sums the others."""
    limit = one_shot_all_reduce.max_message_bytes(group.world_size)
    shapes = (4, 3, limit // 4, limit // 4 + 4)
    tensors = [torch.ones(elements) for elements in shapes] + [torch.ones(4, dtype=torch.int64)]
    taken = [group.small.reduce(group, x.clone()) for x in tensors]
    for x in tensors:
        assert bool((group.all_reduce(x) == group.world_size).all())
    return taken


def without_the_last(group: EmulatedCommunicator) -> str:
    """The first rank's error once the last rank has left."""
    assert group.small.reduce(group, torch.ones(4))
    if group.rank == group.world_size - 1:
        return ""
    builder = interpreter.interpreter_builder  # which does not look at a launch's ``debug``
    builder.options = replace(builder.options, debug=True, sanitize_overflow=False)
    try:
        group.small.reduce(group, torch.ones(4))
    except Exception as exc:
        return f"{exc} {exc.__cause__}"
    return "summed without a rank"


def refused(group: EmulatedCommunicator) -> tuple[bool, str]:
    """Whether a sum went over shared memory, and what was logged; the sum is right either way."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    one_shot_all_reduce.logger.addHandler(handler)
    taken = [group.small.reduce(group, torch.ones(4)) for _ in range(2)]
    assert group.all_reduce(torch.ones(4)).tolist() == [group.world_size] * 4
    return any(taken), "; ".join(logged)


def nccl_requested(group: EmulatedCommunicator) -> tuple[bool, str]:
    """The last rank's environment requests NCCL."""
    if group.rank == group.world_size - 1:
        group.small = SmallAllReduce(emulated_sharing(), TIMEOUT_S, "nccl")
    return refused(group)


def without_descriptors(group: EmulatedCommunicator) -> tuple[bool, str]:
    """The last rank sends no descriptors."""
    one_shot_all_reduce._MAILBOX_TIMEOUT_S = 0.2
    if group.rank == group.world_size - 1:
        one_shot_all_reduce.send_descriptor = lambda name, token, descriptor: None
    return refused(group)
