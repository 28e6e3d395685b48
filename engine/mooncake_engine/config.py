"""How an engine is set up. A config is complete when constructed; derive with ``replace``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mooncake_engine.errors import ConfigError
from mooncake_hal.port_range import PortRange


class Role(str, Enum):
    """Which half of the work an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class LoadFailurePolicy(str, Enum):
    """What a decode instance does when KV does not come across."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


class ExecutorKind(str, Enum):
    """Where an instance's ranks run."""

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How KV moves between instances.

    Args:
        connector: name of the connector; ``MooncakeConnector`` pulls,
            ``MooncakeLayerwiseConnector`` pushes.
        host: address that the side channel and transports listen on.
        advertise_host: address that peers are told; empty: ``host``, or where that is all
            addresses the one of the default route.
        port: side channel's port; 0 takes a free one.
        port_range: where free ports are taken from, by the side channel and the transports of all
            ranks; None: anywhere.
        api_port: the port of the instance's own API, which transports leave alone; 0: none.
        transports: names in order of preference; empty takes all that the backend can use.
        secret: shared by all instances of a deployment.
        lease_s: how long a prefill instance keeps blocks without a word from the decode side.
        transfer_timeout_s: deadline of one request's transfer.
        load_failure: what happens to a request whose KV does not arrive.
    """

    connector: str = "MooncakeConnector"
    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    port_range: PortRange | None = None
    api_port: int = 0
    transports: tuple[str, ...] = ()
    secret: str = ""
    lease_s: float = 30.0
    transfer_timeout_s: float = 30.0
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE


class SpeculativeMethod(str, Enum):
    """What guesses tokens ahead."""

    NGRAM = "ngram"
    """What followed the same tokens earlier in prompt and answer."""
    DRAFT = "draft"
    """A smaller model."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are guessed ahead, so that one step of the model may bring several.

    Args:
        method: what guesses.
        num_speculative_tokens: guesses per request and step, at most.
        model: directory of the draft model; its vocabulary is the model's.
        prompt_lookup_min, prompt_lookup_max: for ``ngram``, so many of the last tokens must have
            occurred before, and so many are compared for the best place; None: 2 and 5, or equal if
            one of them is given.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int = 4
    model: Path | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}"
            )
        if self.method == SpeculativeMethod.DRAFT:
            self._check_draft()
        else:
            self._check_ngram()

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """How many of the last tokens have to be the same, and how many are compared."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 2, 5
        return (high or 0) if low is None else low, (low or 0) if high is None else high

    def _check_draft(self) -> None:
        if self.model is None:
            raise ConfigError(
                "speculative method 'draft' runs a draft model: name its directory as the "
                "speculative model, or use 'ngram', which needs none"
            )
        if self.prompt_lookup_min is not None or self.prompt_lookup_max is not None:
            raise ConfigError(
                "prompt_lookup_min and prompt_lookup_max are for speculative method 'ngram', "
                "'draft' was asked for; leave them out"
            )

    def _check_ngram(self) -> None:
        if self.model is not None:
            raise ConfigError(
                f"speculative method 'ngram' runs no draft model, but {self.model} was named as "
                "one; leave it out, or use method 'draft'"
            )
        low, high = self.prompt_lookup
        if not 1 <= low <= high:
            raise ConfigError(
                f"wanted 1 <= prompt_lookup_min <= prompt_lookup_max, got {low} and {high}"
            )


KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Narrower types that KV may be kept in, as vLLM calls them."""


_POSITIVE = (
    *("tp_size", "pp_size", "block_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an instance needs to know before it loads anything.

    Args:
        model: Hugging Face model directory.
        served_model_name: name in the API; empty means the directory's name.
        role: prefill, decode or both.
        backend: name of a hardware backend, or ``auto``.
        device: device index; where there are several ranks, rank r uses ``device + r``.
        dtype: ``auto`` takes the checkpoint's if the backend has it.
        tp_size: tensor-parallel ranks, of each pipeline stage.
        pp_size: pipeline stages: each has some of the layers, and prompts pass through them in
            chunks of ``max_num_batched_tokens``, several at a time.
        block_size: tokens per KV block; None takes what suits the backend.
        kv_layout: ``auto`` or a name of mooncake_hal.kv.layout.
        kv_cache_dtype: ``auto`` keeps KV in the model's own type; else a key of KV_CACHE_DTYPES.
        num_kv_blocks: size of the KV pool; None derives it from ``kv_cache_bytes``.
        kv_cache_bytes: memory for KV; None derives it from ``memory_utilization``.
        memory_utilization: share of the device's memory that may be used: what weights and the
            largest step leave of it is for KV. None means 0.9 on a device with memory of its own;
            1 GiB for KV on a host.
        swap_space_bytes: host memory per rank that preempted groups of sequences are swapped to; no
            more than the KV itself is used.
        watermark: share of the KV blocks that admitting a request leaves free for those that run.
        scheduler_delay_factor: a prompt waits that many times as long as the last step that
            admitted some took, so that more come together; 0 admits at once.
        max_model_len: longest sequence; None takes the model's.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step; longer prompts run in chunks.
        max_queued_requests: requests that may wait before new ones are refused.
        prefix_caching: keep and reuse the KV of finished prompts.
        async_scheduling: while a step runs, schedule the next one, before the tokens are known.
        enforce_eager: launch every op of every step, where steps could be replayed.
        piecewise_graph_max_tokens: steps with prompts of up to so many tokens are replayed, but for
            their attention; 0: none. None means 512 on a device with memory of its own, none on a
            host.
        kv_transfer: how KV moves; None for an instance that works alone.
        speculative_config: how tokens are guessed ahead; None for not at all. A prefill instance,
            which samples one token per request, leaves it to its decode instances.
        threads: CPU threads per rank; 0 leaves the backend's default.
        executor: where the ranks run.
        ray_address: of the Ray cluster; empty takes this host's, or starts one.
    """

    model: Path
    served_model_name: str = ""
    role: Role = Role.BOTH
    backend: str = "auto"
    device: int = 0
    dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    block_size: int | None = None
    kv_layout: str = "auto"
    kv_cache_dtype: str = "auto"
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    memory_utilization: float | None = None
    swap_space_bytes: int = 1 << 30
    watermark: float = 0.01
    scheduler_delay_factor: float = 0.0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_queued_requests: int = 1024
    prefix_caching: bool = True
    async_scheduling: bool = False
    enforce_eager: bool = False
    piecewise_graph_max_tokens: int | None = None
    kv_transfer: KVTransferConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    threads: int = 0
    executor: ExecutorKind = ExecutorKind.LOCAL
    ray_address: str = ""
    seed: int | None = field(default=None)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.kv_cache_dtype not in ("auto", *KV_CACHE_DTYPES):
            raise ConfigError(
                f"kv_cache_dtype must be one of {['auto', *KV_CACHE_DTYPES]}, got "
                f"{self.kv_cache_dtype!r}"
            )
        if self.swap_space_bytes < 0 or self.scheduler_delay_factor < 0:
            raise ConfigError("swap_space_bytes and scheduler_delay_factor must not be negative")
        if self.piecewise_graph_max_tokens is not None and self.piecewise_graph_max_tokens < 0:
            raise ConfigError(
                "piecewise_graph_max_tokens must not be negative, got "
                f"{self.piecewise_graph_max_tokens}: 0 launches every op of steps with prompts"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
        if self.memory_utilization is not None and not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization must be in (0, 1], got {self.memory_utilization}"
            )
        if self.role is not Role.BOTH and self.kv_transfer is None:
            raise ConfigError(
                f"an instance of role {self.role.value!r} hands KV over or takes it: "
                "give it a kv_transfer configuration, or use role 'both'"
            )
        if self.speculation is not None and self.pp_size > 1:
            raise ConfigError(
                f"speculative decoding was asked for with pp_size {self.pp_size}: tokens are "
                "guessed and checked within one step, which a pipeline spreads over several; use "
                "one stage, and tensor parallelism for more ranks"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How this very instance guesses tokens ahead; None if it does not."""
        return None if self.role is Role.PREFILL else self.speculative_config

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return self.tp_size * self.pp_size

    @property
    def feeds_forward(self) -> bool:
        """Whether a request may be scheduled again before its last token is known: the ranks that
        sample it must be those that run it next, which they are not with several stages, and one
        token must come of a step, which drafts are there to change."""
        return self.async_scheduling and self.pp_size == 1 and self.speculation is None

    @property
    def steps_in_flight(self) -> int:
        """How many steps may be under way at once: with several stages, one in each and one that
        waits before the first; with async scheduling, one and the next."""
        if self.pp_size > 1:
            return self.pp_size + 1
        return 2 if self.feeds_forward else 1

    @property
    def model_name(self) -> str:
        """Name under which the API serves the model."""
        return self.served_model_name or self.model.resolve().name
