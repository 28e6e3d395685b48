"""The emulated NPU rejects what a real one rejects; otherwise tests would prove nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from mooncake_hal.errors import OutOfMemory
from mooncake_hal.testing.backends import load_backend

npu = torch_npu.npu
SAME_DEVICE = "Expected all tensors to be on the same device"
BF16 = torch.bfloat16


def on_npu(*shape: int, dtype: torch.dtype = torch.float32, index: int = 0) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=f"npu:{index}")


MIXED: list[Callable[[], object]] = [
    lambda: on_npu(3) + torch.ones(3),
    lambda: on_npu(3, 3) @ torch.eye(3),
    lambda: functional.linear(on_npu(2, 3), torch.ones(4, 3)),
    lambda: functional.embedding(torch.tensor([1]), on_npu(4, 3)),
    lambda: torch.cat((on_npu(2), torch.ones(2))),
    lambda: on_npu(3, index=0) + on_npu(3, index=1),
    lambda: torch_npu.npu_swiglu(on_npu(2, 8)) + on_npu(2, 4, index=1),
    lambda: torch_npu.npu_rms_norm(on_npu(2, 8), torch.ones(8)),
    lambda: torch_npu.npu_add_rms_norm(on_npu(2, 8), on_npu(2, 8, index=1), on_npu(8)),
]


@pytest.mark.parametrize("mix", MIXED, ids=range(len(MIXED)))
def test_tensors_of_two_devices_do_not_mix(mix: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=SAME_DEVICE):
        mix()


def test_scalars_and_indices_of_the_host_mix() -> None:
    assert (on_npu(3) * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert on_npu(3, 2)[torch.tensor([0, 2])].shape == (2, 2)
    with pytest.raises(TypeError, match="to host memory first"):
        on_npu(2).numpy()


def test_ops_work_in_place_and_views_share_memory() -> None:
    x = torch.zeros(3, 3, device="npu")
    x[1] = 5
    x.view(9)[3:6] += 1
    x.t()[0].sub_(1)
    x.index_copy_(0, torch.tensor([2], device="npu"), on_npu(1, 3))
    assert x.tolist() == [[-1, 0, 0], [5, 6, 6], [1, 1, 1]]
    assert x.device == torch.device("npu", 0)


def test_fresh_memory_is_poison() -> None:
    assert torch.empty(100, device="npu").isnan().all()
    assert (torch.empty(100, dtype=torch.int64, device="npu") == -1).all()


def test_memory_is_counted_and_limited() -> None:
    gc.collect()
    before, total = npu.memory_allocated(0), npu.mem_get_info(0)[1]
    x = on_npu(1 << 20)
    made = x + 1  # allocated by an op, not by the allocator
    assert npu.memory_allocated(0) - before == 8 << 20
    assert npu.mem_get_info(0)[0] == total - npu.memory_allocated(0)
    npu.reset_peak_memory_stats(0)
    del x, made
    assert npu.memory_allocated(0) == before
    assert npu.max_memory_allocated(0) == before + (8 << 20)
    kept = on_npu(1, index=1)
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total, dtype=torch.uint8, device=kept.device)


def test_kv_memory_is_page_aligned() -> None:
    memory = load_backend("ascend").memory
    several = [memory.allocate(nbytes, 1) for nbytes in (1, 5000, (2 << 20) + 1)]
    for allocation in several:
        assert allocation.region.address % (2 << 20) == 0
        assert allocation.region.device == "npu:1"
    for allocation in several:
        allocation.free()
    with pytest.raises(OutOfMemory, match=r"free on npu:1; use fewer KV blocks"):
        memory.allocate(64 << 30, 1)


def test_threads_start_on_the_first_device() -> None:
    runtime, found = load_backend("ascend").runtime, []

    def look() -> None:
        found.append(torch.ones(1, device="npu").device.index)
        runtime.bind_thread(1)
        found.append(torch.ones(1, device="npu").device.index)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [0, 1]
    with pytest.raises(RuntimeError, match="Invalid device ID 9"):
        npu.set_device(9)


def test_streams_and_events() -> None:
    side, event = npu.Stream(), npu.Event(enable_timing=True)
    before = npu.current_stream()
    with npu.stream(side):
        assert npu.current_stream() == side
        event.record()
    assert npu.current_stream() == before
    side.wait_stream(before)
    event.synchronize()
    assert event.query()


def test_pinned_memory() -> None:
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()


def test_random_numbers_follow_the_seed() -> None:
    torch.manual_seed(3)
    first = torch.rand(4, device="npu")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="npu"), first)


def test_private_format_is_for_matrix_products_only() -> None:
    weight, x = on_npu(32, 16, dtype=BF16), on_npu(2, 16, dtype=BF16)
    packed = torch_npu.npu_format_cast(weight, 29)
    assert (torch_npu.get_npu_format(weight), torch_npu.get_npu_format(packed)) == (2, 29)
    assert torch.equal(functional.linear(x, packed), functional.linear(x, weight))
    for misuse in (packed.sum, lambda: packed + 1, lambda: torch_npu.npu_swiglu(packed)):
        with pytest.raises(RuntimeError, match="memory of format 29 as plain rows"):
            misuse()
    with pytest.raises(RuntimeError, match="NZ holds float16, bfloat16 or int8"):
        torch_npu.npu_format_cast(weight.float(), 29)


def attention(**changed: object) -> Tensor:
    """A valid call of two decodes, apart from ``changed`` arguments."""
    cache = on_npu(4, 128, 2 * 64, dtype=BF16)
    arguments: dict[str, object] = {
        "query": on_npu(2, 8, 64, dtype=BF16),
        "key": cache,
        "value": cache,
        "atten_mask": torch.ones(2048, 2048, dtype=torch.int8, device="npu").triu_(1),
        "actual_seq_lengths": [1, 2],
        "actual_seq_lengths_kv": [5, 200],
        "block_table": torch.tensor([[0, 0], [1, 2]], dtype=torch.int32, device="npu"),
        "num_heads": 8,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 128,
        **changed,
    }
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    found: Tensor = torch_npu.npu_fused_infer_attention_score(*tensors, **arguments)[0]
    return found


WRONG: list[tuple[dict[str, object], str]] = [
    ({"num_kv_heads": 2}, "num_kv_heads"),
    ({"query": on_npu(2, 8, 64)}, "bfloat16 or float16"),
    ({"query": on_npu(8, 2, 64, dtype=BF16).transpose(0, 1)}, "must be contiguous"),
    ({"query": on_npu(2, 8, 40, dtype=BF16)}, "by sixteens"),
    ({"input_layout": "XYZ"}, "Layout XYZ is not supported"),
    ({"actual_seq_lengths_kv": [5, 300]}, "of a table of 2 blocks"),
    ({"actual_seq_lengths_kv": [5]}, "a length per row"),
    ({"actual_seq_lengths": [1, 1]}, "sums end at T"),
    ({"atten_mask": None}, "sparse_mode 3"),
    ({"sparse_mode": 0, "atten_mask": None, "actual_seq_lengths": [0, 2]}, "the causal mask"),
    ({"block_table": torch.zeros(2, 2, dtype=torch.int64, device="npu")}, "block_table: int32"),
    ({"block_table": torch.full((2, 2), 9, dtype=torch.int32, device="npu")}, "block ids lie"),
    ({"block_size": 20}, "block_size is 16..512"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_attention_rejects(changed: dict[str, object], message: str) -> None:
    assert attention().shape == (2, 8, 64)
    with pytest.raises(RuntimeError, match=message):
        attention(**changed)


def test_a_slot_is_written_once_and_inside_the_cache() -> None:
    new, cache = on_npu(2, 1, 16, dtype=BF16), on_npu(1, 128, 1, 16, dtype=BF16)

    def write(slots: list[int]) -> None:
        where = torch.tensor(slots, device="npu")
        torch_npu.npu_scatter_pa_kv_cache(new, new, cache, cache, where, cache_mode="Norm")

    write([3, 4])
    assert not cache.isnan().any()
    write([3, 3])
    assert cache.isnan().any(-1).nonzero().tolist() == [[0, 3, 0]]
    with pytest.raises(RuntimeError, match=r"slots lie in \[0, 128\)"):
        write([3, 128])


def write_latents(**changed: Tensor | str) -> Tensor:
    """A valid fused write of two tokens, apart from ``changed`` arguments; returns both caches."""
    caches = [torch.zeros(2, 128, 1, dim, dtype=BF16, device="npu") for dim in (64, 512)]
    arguments: dict[str, Tensor | str] = {
        "kv": on_npu(2, 1, 1, 576, dtype=BF16),
        "gamma": on_npu(512, dtype=BF16),
        "cos": on_npu(2, 1, 1, 64, dtype=BF16),
        "sin": on_npu(2, 1, 1, 64, dtype=BF16),
        "index": torch.tensor([3, 200], device="npu"),
        "k_cache": caches[0],
        "ckv_cache": caches[1],
        "cache_mode": "PA",
        **changed,
    }
    outputs = torch_npu.npu_kv_rmsnorm_rope_cache(**arguments)
    assert all(each.isnan().all() for each in outputs[2:]), "is_output_kv was not set"
    return torch.cat([each.flatten(1) for each in outputs[:2]], dim=1)


def test_latents_are_written_as_rows_or_tiles() -> None:
    """With cosines and sines of one, pairs of ones become zeros and twos, stored as halves."""
    rows, tiles = (write_latents(cache_mode=mode) for mode in ("PA", "PA_NZ"))
    turned = [0.0] * 32 + [2.0] * 32
    assert rows[0].view(-1)[3 * 64 : 4 * 64].tolist() == turned
    assert rows.nonzero().shape == tiles.nonzero().shape == (2 * (512 + 32), 2)
    assert tiles[0, : 128 * 64].view(4, 128, 16)[:, 3].flatten().tolist() == turned
    skipped = write_latents(index=torch.tensor([-1, 200], device="npu"))
    assert not skipped[0].any()
    assert torch.equal(skipped[1], rows[1])


WRONG_LATENTS: list[tuple[dict[str, Tensor | str], str]] = [
    ({"cache_mode": "Norm"}, "knows no 'Norm'"),
    ({"kv": on_npu(2, 576, dtype=BF16)}, "4D tensor expected for input kv"),
    ({"kv": on_npu(2, 1, 1, 320, dtype=BF16)}, "kv, gamma, cos and sin are"),
    ({"cos": on_npu(2, 1, 1, 64)}, "all of one type"),
    ({"cos": on_npu(1, 1, 1, 64, dtype=BF16)}, "kv, gamma, cos and sin are"),
    ({"index": torch.tensor([3, 200], dtype=torch.int32, device="npu")}, "index is int64"),
    ({"index": torch.tensor([3, 256], device="npu")}, r"slots lie in \[0, 256\)"),
    ({"kv": on_npu(0, 1, 1, 576, dtype=BF16)}, "empty tensors"),
    ({"ckv_cache": on_npu(2, 1, 128, 512, dtype=BF16)}, "the caches are"),
    ({"k_rope_scale": on_npu(1, 64)}, "neither quantises"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_LATENTS, ids=lambda value: str(value)[:40])
def test_writing_latents_rejects(changed: dict[str, Tensor | str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        write_latents(**changed)


def test_op_without_a_kernel_raises() -> None:
    with pytest.raises(NotImplementedError, match="npu_interleave_rope"):
        torch_npu.npu_interleave_rope(*[on_npu(1, 1, 1, 64)] * 3)
    with pytest.raises(AttributeError, match="npu_no_such_op"):
        torch_npu.npu_no_such_op()


class TestGraphs:
    def test_nothing_runs_before_the_replay(self) -> None:
        graph, x = npu.NPUGraph(), torch.zeros(3, device="npu")
        with npu.graph(graph):
            x.add_(1)
            doubled = x * 2
        assert x.tolist() == [0, 0, 0]
        assert doubled.isnan().all()
        graph.replay()
        graph.replay()
        assert doubled.tolist() == [4, 4, 4]

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda x: x[0].item(), "waits for the device"),
            (lambda x: x.copy_(torch.ones(3)), "reads the host"),
        ],
    )
    def test_waiting_is_rejected(self, use: Callable[[Tensor], object], message: str) -> None:
        x = torch.zeros(3, device="npu")
        with pytest.raises(RuntimeError, match=message), npu.graph(npu.NPUGraph()):
            use(x)
        assert x.tolist() == [0, 0, 0]

    def test_a_graph_with_attention_waits_for_its_update(self) -> None:
        graph = npu.NPUGraph()
        with npu.graph(graph, auto_dispatch_capture=True):
            attention()
        with pytest.raises(RuntimeError, match="was not updated"):
            graph.replay()
        graph.update(cpu_update_input=[{}])
        graph.replay()
        with pytest.raises(RuntimeError, match="was not updated"):
            graph.replay()

    @pytest.mark.parametrize("wait", ["event", "device"])
    def test_an_update_while_the_last_replay_may_still_run_is_rejected(self, wait: str) -> None:
        graph, before, behind, other = npu.NPUGraph(), npu.Event(), npu.Event(), npu.Event()
        with npu.graph(graph, auto_dispatch_capture=True):
            attention()
        graph.update(cpu_update_input=[{}])
        before.record()
        graph.replay()
        behind.record()
        other.record(npu.Stream())
        before.synchronize()
        other.synchronize()
        npu.synchronize(1)
        with pytest.raises(RuntimeError, match="while its last replay may still run"):
            graph.update(cpu_update_input=[{}])
        behind.synchronize() if wait == "event" else npu.synchronize()
        graph.update(cpu_update_input=[{}])

    def test_collectives_are_captured(self) -> None:
        group = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        alone = group(torch.distributed.HashStore(), 0, 1, group.Options())
        graph, x, found = npu.NPUGraph(), on_npu(3), torch.empty(3, device="npu")
        with npu.graph(graph):
            alone.allgather([[found]], [x]).wait()
            doubled = found * 2
        assert found.isnan().all()
        x.fill_(7)
        graph.replay()
        assert doubled.tolist() == [14, 14, 14]
