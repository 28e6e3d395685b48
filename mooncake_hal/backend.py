"""The contract of a compute backend: a composition of small protocols.

Every backend provides ``name``, ``capabilities``, ``runtime``, ``ops``, ``memory`` and
``communicator``. Everything above the hardware layer is written against this file, and the
conformance suite in ``mooncake_hal.testing`` compares a backend with ``mooncake_hal.reference``.

Tensors are torch tensors on the backend's device. Methods enqueue their work on the device's
current stream and return without waiting for it, unless their docstring says that they block.
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
        index: the device index that the other methods take.
        name: marketing name.
        generation: the chip family, by which kernels and compatibility checks tell devices apart:
            ``"sm_90"``, ``"A2"``, ``"x86_64+avx512_bf16"``.
        total_bytes: size of the device's memory.
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
        dtypes: names of the floating-point types that ``ops`` accept, best first.
        block_sizes: tokens per KV block that the attention kernels support, best first.
        kv_layouts: names of the layouts of ``mooncake_hal.kv.layout`` that the kernels support,
            best first.
        graphs: whether ``runtime.capture`` is supported.
        moe_graphs: whether ``Ops.moe`` can be captured, too.
        transports: names of the transports that can move this backend's memory, best first.
        scheduler_resource: cluster schedulers' (Ray's) name for one of its devices, ``"GPU"`` or
            ``"NPU"``; empty if the scheduler counts CPUs only.
        head_dims: head sizes that grouped-query attention supports; empty: any.
        latent_dims: (latent, rope) widths that latent attention supports; empty: any.
        sampling: whether ``ops`` implement ``SamplingOps``; otherwise torch samples.
        kv_dtypes: names of the narrower types that KV may be stored in; unless it is empty,
            ``ops`` implement ``ScaledKVOps``.
        native_latents: whether ``ops`` implement ``mooncake_hal.latents.NativeLatentOps``.
        max_graphs: how many graphs a process may hold; None: limited by memory only.
        max_decodes_per_graph: largest batch of decodes for which a graph is worth capturing; None:
            no limit.
        fused_experts: whether the backend implements
            ``mooncake_hal.fused_experts.FusedExpertsBackend``.
        fused_rope_writes: whether ``ops`` implement ``mooncake_hal.rope_writes.RopeWriteOps``;
            otherwise models call the norms, the rotation and the KV write one after the other.
        rounding: how the ops round where the contract leaves it open, as pairs of words (what,
            how); instances that exchange KV compare these and report the differences.
        quantization: kinds of quantised weights that the ops multiply without dequantising them
            first. With ``"fp8"`` (linear layers), ``ops`` implement
            ``mooncake_hal.fp8_linear.Fp8LinearOps``; with ``"fp8_experts"`` (experts), also
            ``Fp8ExpertOps``.
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
    head_dims: tuple[int, ...] = ()


class Event(Protocol):
    """A point in a stream's work."""

    def record(self) -> None:
        """Mark the end of the work that is enqueued on the current stream so far."""
        ...

    def query(self) -> bool:
        """Whether the work up to the mark has finished; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until the work up to the mark has finished."""
        ...


class Graph(Protocol):
    """Captured work that can be replayed on the same addresses."""

    def replay(self, host_context_lens: Sequence[int] = ()) -> None:
        """Enqueue the captured work on the current stream, after its previous replay.

        Args:
            host_context_lens: the current values of the captured batch's ``context_lens`` tensor,
                for backends whose kernels take host lists; empty only if no attention was captured.
        """
        ...


class Fence(Protocol):
    """Completion of one piece of work that was submitted to a copy stream."""

    def query(self) -> bool:
        """Whether the work has finished."""
        ...

    def synchronize(self) -> None:
        """Block until the work has finished, and raise the exception that it raised, if any. Work
        that is enqueued from then on sees its results."""
        ...


class CopyStream(Protocol):
    """Copies between device and host memory, in order, concurrent with the model's work."""

    def submit(self, work: Callable[[], object]) -> Fence:
        """Schedule ``work`` after everything that the calling thread has enqueued so far and after
        all earlier submissions; does not block. Work that the caller enqueues later is not ordered
        with it: wait for the fence before touching the same memory."""
        ...

    def close(self) -> None:
        """Finish all submitted work and shut the stream down. Idempotent."""
        ...


class Runtime(Protocol):
    """Devices, threads, streams and graphs."""

    def devices(self) -> Sequence[DeviceInfo]:
        """The devices that are visible to this process."""
        ...

    def device(self, index: int) -> torch.device:
        """Return the torch device with that index; raises DeviceError if there is none."""
        ...

    def bind_thread(self, index: int) -> None:
        """Make the device current in the calling thread. Every helper thread calls this first."""
        ...

    def synchronize(self, index: int) -> None:
        """Block until all work enqueued on the device has finished."""
        ...

    def memory_info(self, index: int) -> MemoryInfo:
        """The device's free and total memory now."""
        ...

    def reset_peak(self, index: int) -> None:
        """Restart the measurement that ``peak_bytes`` reports."""
        ...

    def peak_bytes(self, index: int) -> int:
        """Peak memory use since ``reset_peak``, as far as the device can tell. It includes memory
        that this process's allocator keeps for reuse, and memory that other processes have
        allocated since this one first bound a thread to the device."""
        ...

    def event(self, index: int) -> Event:
        """Create an event on the device."""
        ...

    def copy_stream(self, index: int) -> CopyStream:
        """Create a copy stream on the device; the caller owns and closes it."""
        ...

    def capture(self, run: Callable[[], None]) -> Graph:
        """Run ``run`` once and record its work; raises CapabilityError if ``graphs`` is False."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """Which tokens attend to which KV. Sequences with one query token (decodes) come first.

    ``context_lens`` counts a sequence's KV tokens *including* the new ones: query token i of a
    sequence with q new tokens is at position ``context_len - q + i`` and attends to all positions
    up to and including its own. The ``host_*`` fields are the same numbers as plain ints, for
    backends whose kernels take host lists; the scheduler has them anyway.

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
    """The kernels of a decoder model, with grouped-query or latent attention.

    Queries, keys, values and the x of ``rms_norm`` and ``linear`` may be views of a wider tensor.
    KV caches are strided views ``[num_blocks, block_size, kv_heads, head_dim]`` of any layout
    that ``capabilities.kv_layouts`` lists; only the last dimension is contiguous. A backend without
    a fused ``write_latents`` inherits from ``mooncake_hal.latents.ComposedLatentWrites``.
    """

    def write_kv(
        self,
        key: Tensor,  # [tokens, kv_heads, head_dim]
        value: Tensor,  # [tokens, kv_heads, value_dim]; value_dim may differ from head_dim
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,  # [tokens] int64
    ) -> None:
        """Write each token's key and value to its slot of the caches."""
        ...

    def decode_attention(
        self,
        query: Tensor,  # [num_decodes, heads, head_dim]
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # [num_decodes, heads, head_dim]
        """Attention of the batch's leading decodes over their paged KV caches."""
        ...

    def prefill_attention(
        self,
        query: Tensor,  # [tokens of the sequences after the decodes, heads, head_dim]
        key_cache: Tensor,
        value_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:  # like query
        """Causal attention of the remaining sequences over their paged KV caches, cached prefixes
        included."""
        ...

    def rms_norm(
        self,
        x: Tensor,  # [..., dim]
        weight: Tensor,  # [dim]
        eps: float,
    ) -> Tensor:
        """Return ``x / sqrt(mean(x²) + eps) * weight``, with the mean computed in float32."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``; may overwrite both inputs."""
        ...

    def rope(
        self,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,  # [tokens, kv_heads, head_dim]
        positions: Tensor,  # [tokens] int64
        cos_sin: Tensor,  # [max_positions, rotary_dim] float32, cosines then sines
    ) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings (NeoX style, rotated halves) to the first ``rotary_dim`` elements
        of each head; may work in place."""
        ...

    def pack_weight(
        self,
        weight: Tensor,  # [out, in]
    ) -> Tensor:
        """Return the weight in the layout that ``linear`` runs fastest on; may be the same tensor.

        The caller calls this once per weight after loading, then drops the original. The result is
        opaque and accepted by ``linear`` only (a CPU backend blocks the matrix here once instead of
        in every call).
        """
        ...

    def linear(
        self,
        x: Tensor,  # [tokens, in]
        weight: Tensor,  # the result of pack_weight for [out, in]
        bias: Tensor | None,  # [out]
    ) -> Tensor:  # [tokens, out]
        """Return ``x @ weight.T + bias``."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` for x = [..., gate ++ up]; the last dimension is halved."""
        ...

    def pack_experts(
        self,
        weights: Tensor,  # [experts, out, in]
    ) -> tuple[Tensor, ...]:
        """Return the experts' weights in the layout that ``moe`` runs fastest on, as
        ``pack_weight`` does for ``linear``.

        The result is opaque and accepted by ``moe`` and ``unpack_experts`` only.
        """
        ...

    def unpack_experts(
        self,
        packed: tuple[Tensor, ...],  # the result of pack_experts for [experts, out, in]
    ) -> Tensor:  # [experts, out, in], dense
        """Return the original weights, bit for bit, so that experts can move to other ranks. The
        result may share memory with ``packed``, which the caller must not use afterwards."""
        ...

    def moe(
        self,
        x: Tensor,  # [tokens, hidden]
        gate_up: tuple[Tensor, ...],  # the result of pack_experts for [experts, 2 * inner, hidden]
        down: tuple[Tensor, ...],  # the result of pack_experts for [experts, hidden, inner]
        expert_ids: Tensor,  # [tokens, top_k] int64, distinct within a row
        expert_weights: Tensor,  # [tokens, top_k] float32
    ) -> Tensor:  # [tokens, hidden]
        """Run each token through its chosen experts:
        ``sum of weight * down @ silu_mul(gate_up @ x)``.

        The sum is accumulated in float32 and rounded once.
        """
        ...

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy blocks within a cache view: ``source[i]`` onto ``target[i]``, both [n] int64, in any
        order or all at once: no copy's source is the target of another one."""
        ...

    def gather_blocks(self, cache: Tensor, block_ids: Tensor, staging: Tensor) -> None:
        """Copy blocks ([n] int64) of a cache view to ``staging``, a contiguous tensor of their
        shape."""
        ...

    def scatter_blocks(self, staging: Tensor, cache: Tensor, block_ids: Tensor) -> None:
        """Copy ``staging``, a contiguous tensor, to blocks ([n] int64) of a cache view."""
        ...


class ScaledKVOps(Ops, Protocol):
    """Ops over KV caches of a narrower type; implemented where ``capabilities.kv_dtypes`` lists
    any."""

    def with_kv_scales(self, first: float, second: float) -> Ops:
        """Return the same ops for one layer's caches, which are of one of ``kv_dtypes``.

        ``write_kv`` and ``write_latents`` of the result store values divided by their plane's scale
        and saturate at the type's largest finite number; attention multiplies by the scale again.

        Args:
            first, second: the planes' scales: of keys and values, or of latents and rope rows.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMetadata:
    """Per-row sampling parameters. Every tensor has shape [rows] and is on the device.

    Args:
        temperatures: float32; 0 is greedy: the largest logit, the first of equal ones.
        top_ks: int32; 0 disables the filter.
        top_ps: float32; 1 disables the filter. Applies to the tokens that top-k and min-p leave.
        min_ps: float32, as a fraction of the largest probability; 0 disables the filter.
        uniforms: float64 in [0, 1), the random number that selects the token.
    """

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    uniforms: Tensor


class SamplingOps(Protocol):
    """Sampling on the device; implemented where ``capabilities.sampling`` is True."""

    def sample(
        self,
        logits: Tensor,  # [rows, vocab] float32
        sampling_metadata: SamplingMetadata,
    ) -> Tensor:  # [rows] int64
        """Sample one token per row: the first one at which the cumulative probability, in token
        order, exceeds the row's uniform number.

        Every filter is a threshold on the logit, so tokens that tie at the threshold are all kept.
        A row's token depends on that row alone, bit for bit, so ranks with equal logits sample the
        same tokens.
        """
        ...

    def argmax(
        self,
        logits: Tensor,  # [rows, vocab] float16, bfloat16 or float32
    ) -> Tensor:  # [rows] int64
        """The largest logit's token of each row, the first of equal ones; -1 if that logit is not
        finite, or if any logit of the row is NaN."""
        ...


class Allocation(Protocol):
    """Memory that a transport can register."""

    @property
    def region(self) -> MemoryRegion:
        """The region to register with an endpoint."""
        ...

    @property
    def tensor(self) -> Tensor:
        """The whole allocation as a flat uint8 tensor on the device."""
        ...

    def free(self) -> None:
        """Release the memory. The caller has revoked the region and dropped all views of the tensor
        before. Idempotent."""
        ...


class Memory(Protocol):
    """Allocates memory for KV, aligned and mapped as the backend's transports need it."""

    def allocate(self, nbytes: int, index: int) -> Allocation:
        """Allocate zeroed memory on a device; raises OutOfMemory, whose message says how much was
        requested and how much is free."""
        ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of processes, and this process's rank in it.

    Args:
        rank: this process's rank, from 0.
        world_size: number of ranks in the group.
        init_method: rendezvous URL as torch.distributed takes it: ``"tcp://127.0.0.1:29500"``.
        timeout_s: how long a collective may take before the group is considered broken, in seconds.
    """

    rank: int
    world_size: int
    init_method: str
    timeout_s: float = 60.0


class Exchange(Protocol):
    """An all-to-all in flight."""

    def wait(self) -> Tensor:
        """Return the received rows. The current stream waits for them, on a CPU the calling thread.
        May be called once."""
        ...


class Communicator(Protocol):
    """Collectives, also of strided tensors, of the ranks of one instance: a stage's tensor-parallel
    ranks, or the n-th rank of every stage. They take all dtypes of the backend, and int64."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def waited_s(self) -> Mapping[str, float]:
        """Total seconds for which this thread was blocked in collectives, by their names. Empty
        where the device waits and the host does not; use the device's profiler there."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place; returns x."""
        ...

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate all ranks' x along ``dim``, in rank order."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the x of rank ``source``, in place; returns x."""
        ...

    def start_all_to_all(
        self,
        x: Tensor,  # [sum of send_rows, ...]
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
    ) -> Exchange:
        """Start sending rows of x to every rank, the first ``send_rows[0]`` to rank 0 and so on,
        and receiving ``recv_rows[i]`` rows from rank i. ``Exchange.wait`` returns the received rows
        in rank order, as [sum of recv_rows, ...].

        Every rank of the group makes this call, and ``recv_rows[i]`` equals the number of rows that
        rank i sends to this one. Counts may be 0 and rows are not padded, so no more bytes than
        these are transferred. Work that is enqueued before ``wait`` runs concurrently. The caller
        must not change x until ``wait`` has returned.
        """
        ...

    def send(self, x: Tensor, target: int) -> None:
        """Send x to rank ``target``, which must call ``recv`` for it; the caller must not change x
        afterwards.

        Tensors sent to one rank arrive in order. The call blocks only until ``target`` has received
        the previous tensor, so that a pipeline stage runs at most one step ahead of the next; the
        first call may also wait until ``target`` has joined. A failure may be raised by a later
        call.
        """
        ...

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x, in place, with the tensor that rank ``source`` sends, which has x's shape
        and dtype; returns x."""
        ...

    def barrier(self) -> None:
        """Block until every rank has reached the barrier."""
        ...

    def close(self) -> None:
        """Leave the group; tensors that were sent and not yet received are lost. Idempotent."""
        ...


class Backend(Protocol):
    """A loaded backend."""

    @property
    def name(self) -> str:
        """The name in the backend's spec."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do; constant for the life of the process."""
        ...

    @property
    def runtime(self) -> Runtime:
        """Devices, threads, streams and graphs."""
        ...

    @property
    def ops(self) -> Ops:
        """The kernels."""
        ...

    @property
    def memory(self) -> Memory:
        """Allocator of memory that transports can register."""
        ...

    def communicator(self, group: GroupSpec) -> Communicator:
        """Join a group; blocks until all ranks have joined, up to ``group.timeout_s``."""
        ...
