"""Times work on a GPU, and measures the GPU's own limits to compare it with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mooncake_hal.backend import Backend

WARM_UPS, ROUNDS = 5, 31
FLUSHED_BYTES = 256 << 20
"""More than any GPU's L2 cache; writing it takes longer than enqueueing the timed work."""
MOST_COPIED_BYTES = 8 << 30
MATMUL_SIZE = 8192


def seconds_of(cuda: Backend, run: Callable[[], object]) -> float:
    """Median time of a graph's replays, each with none of its data in L2.

    The host runs ahead of the device throughout, so the time includes neither launches nor waits.
    """

    def once() -> None:
        run()

    graph = cuda.runtime.capture(once)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    spans = []
    for _ in range(WARM_UPS + ROUNDS):
        flushed.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) / 1000 for begin, end in spans[WARM_UPS:])
    return float(times[ROUNDS // 2])


def copy_bandwidth(cuda: Backend, nbytes: int) -> float:
    """Bytes per second, read and written, of a copy of ``nbytes`` inside the device. A copy of a
    few microseconds spends the same share of its time on start-up as a kernel of that length."""
    half = min(nbytes, MOST_COPIED_BYTES) // 2
    source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * half / seconds_of(cuda, lambda: target.copy_(source))


def matmul_rate(cuda: Backend) -> float:
    """Operations per second of a large matrix product in bfloat16."""
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATMUL_SIZE**3 / seconds_of(cuda, lambda: a @ b)


def seconds_in_kernels(run: Callable[[], object], rounds: int) -> float:
    """Sum of the kernels' own times in a run, without the gaps between them."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    micros = sum(
        event.self_device_time_total
        for event in seen.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )  # host calls that launch kernels are also events and also have device time
    assert micros > 0, "the profiler saw no kernel: is CUPTI available?"
    return float(micros) / 1e6 / rounds
