"""The stages of an accelerator's tests and benchmarks: what each runs, and what it needs.

Standard library only. ``{backend}`` in an argument is the backend's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_SECONDS = 540


@dataclass(frozen=True)
class Stage:
    """A stage of a run.

    Args:
        name: the name for ``--stage``.
        what: short description for ``--list``.
        tests: arguments of pytest.
        seconds: time limit, after which the stage is killed.
        needs: a module or a program, without which the stage is skipped.
        devices: number of devices, with fewer of which the stage is skipped.
        through: a wrapper command for the tests.
        environment: additional environment variables.
        processes: maximum number of test processes, if pytest-xdist is installed.
        dist: pytest-xdist's distribution mode.
        measures: whether the stage records figures; it then fails without one.
        is_alone: whether it needs the device exclusively, because it checks the whole memory.
    """

    name: str
    what: str
    tests: tuple[str, ...]
    seconds: int = MOST_SECONDS
    needs: str = ""
    devices: int = 1
    through: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    dist: str = "worksteal"
    measures: bool = False
    is_alone: bool = False


_SUITE = "tests/conformance/test_backends.py"
_CUDA, _ASCEND = "tests/hardware/cuda", "tests/hardware/ascend"
_BENCH = "tests/benchmarks/cuda"
_MEMORY = "(peak_memory or too_much_memory)"
_CONFORMANCE = (
    Stage(
        "conformance",
        "every op against the reference",
        (_SUITE, "-k", f"{{backend}} and not {_MEMORY}"),
        processes=12,  # most of its time goes into compiling
    ),
    Stage(
        "memory",
        "free and peak memory, alone on the device",
        (_SUITE, "-k", f"{{backend}} and {_MEMORY}"),
        is_alone=True,
    ),
)
_OWN_KERNELS = {
    "MOONCAKE_HAL_CUDA_ATTENTION": "triton",  # even if another library is faster
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # caching hides out-of-bounds accesses between tensors
}


def _sanitizer(tool: str) -> Stage:
    through = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")
    through += ("--report-api-errors", "no", "--require-cuda-init", "yes")
    return Stage(
        tool,
        f"every kernel once, under compute-sanitizer's {tool}",
        (f"{_CUDA}/test_kernels.py",),
        needs="compute-sanitizer",
        through=through,
        environment=_OWN_KERNELS,
    )


def _cuda(*names: str) -> tuple[str, ...]:
    return tuple(f"{_CUDA}/test_{name}.py" for name in names)


def _bench(name: str, what: str, *tests: str, needs: str = "", devices: int = 1) -> Stage:
    return Stage(name, what, tests, needs=needs, devices=devices, measures=True)


def _kernels(selection: str) -> tuple[str, ...]:
    return (f"{_BENCH}/test_kernels.py", "-k", selection)


def _served(file: str, *more: str) -> tuple[str, ...]:
    return (f"tests/benchmarks/serving/test_{file}.py", *more)


_SERVING = (
    _bench("steps", "a random 8 B model's decode steps, 1 to 128 rows", *_served("steps")),
    _bench("alone", "its HTTP streams, with and without async scheduling", *_served("alone")),
    _bench("pull", "prefill and decode on one device, KV pulled", *_served("pair", "-k", "pull")),
    _bench("push", "the same, KV pushed layer by layer", *_served("pair", "-k", "push")),
)
"""For any backend: without a GPU, run them with ``--backend cpu --shape tiny``."""

RUNS: Mapping[str, tuple[Stage, ...]] = {
    "test-cuda": (
        *_CONFORMANCE,
        Stage(
            "kernels",
            "kernels, libraries, selection",
            _cuda("kernels", "libraries", "selection"),
            processes=6,
        ),
        Stage(
            "engine",
            "decode graphs and piecewise graphs, compared with the CPU's tokens",
            (
                *_cuda("changed_logits", "decode_step", "engine_step", "piecewise_graphs"),
                "-k",
                "not over_an_hour",
            ),
        ),
        Stage(
            "soak",
            "memory is flat over 120,000 steps (--soak-steps)",
            (*_cuda("engine_step"), "-k", "over_an_hour"),
            is_alone=True,
        ),
        Stage("pairs", "separate prefill and decode", _cuda("pd"), processes=6),
        Stage(
            "transports",
            "cuda_ipc and staged",
            _cuda("transport"),
            processes=4,
            dist="loadscope",  # one process per class: cases check their own process for leaks
        ),
        Stage("ranks", "small all-reduces of two GPUs", _cuda("small_all_reduces"), devices=2),
        _sanitizer("memcheck"),
        _sanitizer("racecheck"),
        _sanitizer("synccheck"),
    ),
    "bench-cuda": (
        _bench("decode", "decode attention against a copy", *_kernels("decode_attention")),
        _bench(
            "flashinfer",
            "decode attention against FlashInfer",
            *_kernels("flashinfer"),
            needs="flashinfer",
        ),
        _bench(
            "kernels",
            "prompts, latents, experts",
            *_kernels("not decode_attention and not flashinfer"),
        ),
        _bench("transfer", "KV from GPU to GPU against a copy", f"{_BENCH}/test_kv_transfer.py"),
        _bench("model", "an 8 B shape against transformers", f"{_BENCH}/test_engine.py"),
        *_SERVING,
        _bench(
            "ranks", "small all-reduces against NCCL's", f"{_BENCH}/test_all_reduce.py", devices=2
        ),
    ),
    "test-ascend": (
        *_CONFORMANCE,
        Stage("pairs", "separate prefill and decode", (f"{_ASCEND}/test_pd.py",)),
        Stage("transports", "hccs", (f"{_ASCEND}/test_hccs.py",)),
        *_SERVING,
    ),
}
