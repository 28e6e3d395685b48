"""The contract of a compute backend: a composition of small protocols.

Required of every backend: ``name``, ``capabilities``, ``runtime``, ``ops``, ``memory``,
``communicator``. Everything above the hardware layer is written against this file, and the suite
in ``mooncake_hal.testing`` proves a backend against ``mooncake_hal.reference``.

Tensors are torch tensors on the backend's device. All work is enqueued on the device's current
stream; only methods that say so wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mooncake_hal.latents import LatentOps
from mooncake_hal.transport import MemoryRegion

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device.

    Args:
        index: the number that the other methods take.
        name: marketing name.
        generation: the family that kernels and deployments care about: ``"sm_90"``, ``"A2"``,
            ``"x86_64+avx512_bf16"``.
        total_bytes: memory of the device.
    """

    index: int
    name: str
    generation: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and total bytes of a device, as its driver reports them now."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do on this machine.

    Args:
        dtypes: names of the floating types that ``ops`` takes, best first.
        block_sizes: tokens per KV block that the attention kernels take, best first.
        kv_layouts: names of the layouts of ``mooncake_hal.kv.layout`` that they run on, best first.
        graphs: whether ``runtime.capture`` works.
        moe_graphs: whether it also takes ``Ops.moe``.
        transports: names of the transports that can move this backend's memory, best first.
        scheduler_resource: what cluster schedulers (Ray) call one of its devices, ``"GPU"`` or
            ``"NPU"``; empty where only CPUs are counted.
        latent_dims: (latent, rope) widths that latent attention runs on; empty: any.
        sampling: whether ``ops`` are also ``SamplingOps``; else torch chooses tokens.
        kv_dtypes: names of the narrower types that KV may be kept in; with any, ``ops`` are also
            ``ScaledKVOps``.
        native_latents: whether ``ops`` are also ``mooncake_hal.latents.NativeLatentOps``.
        max_graphs: how many a process may hold; None: as many as there is memory for.
        max_decodes_per_graph: sequences of the largest graph of decodes that pays; None: as many as
            run.
        fused_experts: whether it is also a ``mooncake_hal.fused_experts.FusedExpertsBackend``.
        fused_rope_writes: whether ``ops`` are also ``mooncake_hal.rope_writes.RopeWriteOps``; else
            models call norms, rotation and the write one after the other.
        rounding: how its ops round where the contract leaves it open, as (what, how) in words;
            instances that exchange KV compare them, and say what differs.
        quantization: which quantised weights are multiplied as they are; with ``"fp8"`` those of
            linear layers, and ``ops`` are also ``mooncake_hal.fp8_linear.Fp8LinearOps``; with
            ``"fp8_experts"`` those of experts, and they are ``Fp8ExpertOps``, too.
    """

    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...]
    kv_layouts: tuple[str, ...]
    graphs: bool
    transports: tuple[str, ...]
    scheduler_resource: str = ""
    latent_dims: tuple[tuple[int, int], ...] = ()
    sampling: bool = False
    kv_dtypes: tuple[str, ...] = ()
    native_latents: bool = False
    max_graphs: int | None = None
    max_decodes_per_graph: int | None = None
    rounding: tuple[tuple[str, str], ...] = ()
    moe_graphs: bool = True
    fused_experts: bool = False
    quantization: tuple[str, ...] = ()
    fused_rope_writes: bool = False


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the current stream's work so far."""
        ...

    def query(self) -> bool:
        """Whether that work has finished; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until that work has finished."""
        ...


class Graph(Protocol):
    """Captured work that can be run again on the same addresses."""

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        """Enqueue the captured work on the current stream, once its last replay is done.

        Args:
            host_context_lens: what the batch of the captured decodes has in its tensors now, for
                backends whose kernels take host lists; empty: as in the last replay or capture.
        """
        ...


class Fence(Protocol):
    """The end of a piece of work on a copy stream."""

    def query(self) -> bool:
        """Whether the work is over."""
        ...

    def synchronize(self) -> None:
        """Block until it is; what is enqueued from then on sees what it has left. Raises what the
        work raised."""
        ...


class CopyStream(Protocol):
    """Copies between device and host memory, in order, beside what the model computes."""

    def submit(self, work: Callable[[], object]) -> Fence:
        """Run ``work`` behind everything that the calling thread has enqueued so far, and behind
        what was submitted before; returns at once. What is enqueued later is not ordered with it:
        who touches the same memory waits for the fence."""
        ...

    def close(self) -> None:
        """Finish what was submitted and end. Idempotent."""
        ...


class Runtime(Protocol):
    """Devices, threads, streams and graphs."""

    def devices(self) -> Sequence[DeviceInfo]:
        """The devices that this process can see."""
        ...

    def device(self, index: int) -> torch.device:
        """Return the torch device of that index; raises DeviceError if there is none."""
        ...

    def bind_thread(self, index: int) -> None:
        """Make the device current in the calling thread; every helper thread calls it first."""
        ...

    def synchronize(self, index: int) -> None:
        """Block until all work enqueued on the device has finished."""
        ...

    def memory_info(self, index: int) -> MemoryInfo:
        """Free and total memory now."""
        ...

    def reset_peak(self, index: int) -> None:
        """Forget how much memory was taken at most so far."""
        ...

    def peak_bytes(self, index: int) -> int:
        """The most memory that was taken since ``reset_peak``, as far as the device can tell: by
        this process, what an allocator keeps for reuse included; of other processes what they have
        taken since this one first bound a thread to the device."""
        ...

    def event(self, index: int) -> Event:
        """A new event on that device."""
        ...

    def copy_stream(self, index: int) -> CopyStream:
        """A new copy stream of that device; its owner closes it."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run ``run`` once and record it; raises CapabilityError if ``graphs`` is False."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Which tokens attend to which KV. Sequences with one query token (decodes) come first.

    ``context_lens`` counts a sequence's KV tokens *including* the new ones: query token i of a
    sequence with q new tokens sits at position ``context_len - q + i`` and sees everything up to
    itself. The ``host_*`` fields are the same numbers as plain ints, for backends whose kernels
    take host lists; they cost nothing to fill since the scheduler has them.

    Args:
        num_decodes: how many leading sequences have exactly one query token.
        query_start: [num_seqs + 1] int32, offsets of the sequences' query tokens.
        context_lens: [num_seqs] int32.
        block_tables: [num_seqs, max_blocks] int32, padded with any valid block id.
        slot_mapping: [num_tokens] int64, ``block_id * block_size + offset`` of each new token.
        block_size: tokens per KV block.
        host_query_lens: query lengths on the host.
        host_context_lens: context lengths on the host.
    """

    num_decodes: int
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    host_query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]


class Ops(LatentOps, Protocol):
    """The kernels of a decoder, with grouped-query or latent attention.

    KV caches are strided views ``[num_blocks, block_size, kv_heads, head_dim]`` of any layout
    that ``capabilities.kv_layouts`` lists; only the last dimension is contiguous. A backend without
    a fused ``write_latents`` inherits ``mooncake_hal.latents.ComposedLatentWrites``.
    """

    def write_kv(
        self,
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,  # [tokens, kv_heads, head_dim], may be of another width
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> None:
        """Store each token's key and value in its slot."""
        ...

    def decode_attention(
        self,
        query: Tensor,  # [num_decodes, heads, head_dim]
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # [num_decodes, heads, head_dim]
        """Attention of the batch's leading decodes over their paged KV."""
        ...

    def prefill_attention(
        self,
        query: Tensor,  # [tokens of the sequences after the decodes, heads, head_dim]
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # like query
        """Causal attention of the remaining sequences over their paged KV (cached prefix too)."""
        ...

    def rms_norm(
        self,
        x: Tensor,  # [..., dim]
        weight: Tensor,  # [dim]
        eps: float,
    ) -> Tensor:
        """``x / sqrt(mean(x²) + eps) * weight``, the mean in float32."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``; may reuse both inputs' memory."""
        ...

    def rope(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        positions: Tensor,  # [tokens] int64
        cos_sin: Tensor,  # [max_positions, rotary_dim] float32, cosines then sines
    ) -> tuple[Tensor, Tensor]:
        """Rotate halves (NeoX form) of the first ``rotary_dim`` elements; may work in place."""
        ...

    def pack_weight(
        self,
        weight: Tensor,  # [out, in]
    ) -> Tensor:
        """Return the weight in the form that ``linear`` runs on best; may be the same tensor.

        Called once per weight after loading; the caller then drops the original. The result is
        opaque: only ``linear`` takes it (a CPU blocks it once here, and not again at every call).
        """
        ...

    def linear(
        self,
        x: Tensor,  # [tokens, in]
        weight: Tensor,  # what pack_weight returned for [out, in]
        bias: Tensor | None,  # [out]
    ) -> Tensor:  # [tokens, out]
        """``x @ weight.T + bias``."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """``silu(gate) * up`` for x = [..., gate ++ up]; the result has half the last dim."""
        ...

    def pack_experts(
        self,
        weights: Tensor,  # [experts, out, in]
    ) -> tuple[Tensor, ...]:
        """Return the experts' weights in the form that ``moe`` runs on best; see ``pack_weight``.

        The result is opaque: only ``moe`` and ``unpack_experts`` take it.
        """
        ...

    def unpack_experts(
        self,
        packed: tuple[Tensor, ...],  # what pack_experts returned for [experts, out, in]
    ) -> Tensor:  # [experts, out, in], dense
        """The weights as they were before, bit by bit; may be memory of ``packed``, which the
        caller then uses no more. For experts that move to other ranks."""
        ...

    def moe(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: tuple[Tensor, ...],  # what pack_experts returned for [experts, 2 * inner, hidden]
        down: tuple[Tensor, ...],  # what pack_experts returned for [experts, hidden, inner]
        expert_ids: Tensor,  # [tokens, chosen] int64, all different in a row
        expert_weights: Tensor,  # [tokens, chosen] float32
    ) -> Tensor:  # [tokens, hidden]
        """Each token through its chosen experts: ``sum of weight * down @ silu_mul(gate_up @ x)``.

        The sum is made in float32 and rounded once.
        """
        ...

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks inside a cache view, ``source[i]`` onto ``target[i]`` ([n] int64)."""
        ...

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        """Pack blocks ([n] int64) of a cache view into contiguous ``staging`` of their shape."""
        ...

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        """Unpack contiguous ``staging`` into blocks ([n] int64) of a cache view."""
        ...


class ScaledKVOps(Ops, Protocol):
    """What the ``ops`` of a backend with ``capabilities.kv_dtypes`` also do."""

    def with_kv_scales(self, first: float, second: float) -> Ops:
        """The same ops over caches of one of ``kv_dtypes``, a layer's at a time.

        ``write_kv`` and ``write_latents`` then store values divided by their plane's scale, what is
        too large as the largest number there is; attention multiplies by it again.

        Args:
            first, second: scales of the planes: of keys and values, or of latents and rope rows.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """How each row's token is sampled; all [rows], on the device.

    Args:
        temperatures: float32; 0 takes the largest logit, the first of equals.
        top_ks: int32; 0 is off.
        top_ps: float32; 1 is off. Counts within what top-k and min-p leave.
        min_ps: float32, of the largest probability; 0 is off.
        uniforms: float64 in [0, 1); the number that decides.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    uniforms: Tensor


class SamplingOps(Protocol):
    """What the ``ops`` of a backend with ``capabilities.sampling`` also do."""

    def sample(
        self,
        logits: Tensor,  # [rows, vocab] float32
        sampling_metadata: SamplingMetadata,
    ) -> Tensor:  # [rows] int64
        """Draw a token per row: the first at which the running probability, in token order,
        exceeds the row's uniform number.

        Every filter is a threshold on the logit: ties at the edge stay in together. A row's token
        depends on that row alone, to the bit, so ranks with equal logits choose alike.
        """
        ...


class Allocation(Protocol):
    """Memory that a transport can register."""

    @property
    def region(self) -> MemoryRegion:
        """What to register."""
        ...

    @property
    def tensor(self) -> Tensor:
        """All of it as a flat uint8 tensor on the device."""
        ...

    def free(self) -> None:
        """Give it back. The caller has dropped its views and deregistered it. Idempotent."""
        ...


class Memory(Protocol):
    """Memory for KV, aligned and shaped as the backend's transports need it."""

    def allocate(self, nbytes: int, index: int) -> Allocation:
        """Allocate zeroed memory on a device; raises OutOfMemory with both figures."""
        ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Where a process stands in a group of processes.

    Args:
        rank: this process, from 0.
        world_size: how many there are.
        init_method: rendezvous, as torch.distributed takes it: ``"tcp://127.0.0.1:29500"``.
        timeout_s: how long a collective may take before the group counts as broken.
    """

    rank: int
    world_size: int
    init_method: str
    timeout_s: float = 60.0


class Exchange(Protocol):
    """An all-to-all that was started."""

    def wait(self) -> Tensor:
        """What arrived; the current stream waits for it, on a host the calling thread. Once."""
        ...


class Communicator(Protocol):
    """A group of an instance's ranks: the tensor-parallel ones of a stage, or the stages' n-th."""

    @property
    def rank(self) -> int:
        """This process."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Seconds that calls have kept this thread waiting since the start, by name of the
        collective. Empty where a device waits and the host does not; its profiler knows."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place; returns x."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate every rank's x along ``dim``, in rank order."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with ``source``'s, in place; returns x."""
        ...

    def start_all_to_all(
        self,
        x: Tensor,  # [sum of send_rows, ...]
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
    ) -> Exchange:
        """Give every rank rows of x, the first ``send_rows[0]`` to rank 0 and so on, and take
        ``recv_rows[i]`` from rank i; they arrive in rank order, [sum of recv_rows, ...].

        Nothing is padded, and counts may be 0: no more crosses than was given. A rank's
        ``recv_rows[i]`` is what rank i sends it; every rank calls it. Work that is enqueued before
        ``wait`` runs beside it. The caller changes x no more until then.
        """
        ...

    def send(self, x: Tensor, target: int) -> None:
        """Hand x over to rank ``target``, which has to ``recv`` it; the caller changes it no more.

        What is sent to a rank arrives in order. Waits for nothing but the receipt of what was sent
        there before, so that a stage of a pipeline is one step ahead of the next; the first time,
        it may wait for the other to be there. A failure may show in a later call.
        """
        ...

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x, in place, with what rank ``source`` sends, of its shape and dtype; returns
        x."""
        ...

    def barrier(self) -> None:
        """Block until every rank is here."""
        ...

    def close(self) -> None:
        """Leave the group; what was sent and not received is lost. Idempotent."""
        ...


class Backend(Protocol):
    """A loaded backend."""

    @property
    def name(self) -> str:
        """The spec's name."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, fixed for the life of the process."""
        ...

    @property
    def runtime(self) -> Runtime:
        """Devices, threads, streams, graphs."""
        ...

    @property
    def ops(self) -> Ops:
        """Kernels."""
        ...

    @property
    def memory(self) -> Memory:
        """Memory that transports can register."""
        ...

    def communicator(self, group: GroupSpec) -> Communicator:
        """Join a group; blocks until every rank has, up to ``group.timeout_s``."""
        ...
