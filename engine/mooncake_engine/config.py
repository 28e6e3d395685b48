"""EngineConfig: all options of the engine, with their flags; ``config_checks`` has the checks.

A config is complete and immutable once constructed; derive others with ``replace``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mooncake_engine.config_checks import (
    check_expert_options,
    check_kv_event_ports,
    check_nodes_of_data_parallel_ranks,
    check_values,
)
from mooncake_engine.errors import ConfigError
from mooncake_engine.node_config import NodeConfig
from mooncake_engine.speculative_config import SpeculativeConfig
from mooncake_hal.options import byte_count, option, positive_int
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.kv_events_config import KVEventsConfig, read_kv_events_config
from mooncake_kv.pool.pool_config import KVPoolConfig, read_kv_pool


class Role(str, Enum):
    """The work that an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class ExecutorKind(str, Enum):
    """Where an instance's ranks run."""

    LOCAL = "local"
    RAY = "ray"


def read_dtype(name: str) -> str:
    """Returns torch's name of a data type, given that or vLLM's short name."""
    return {"half": "float16", "float": "float32"}.get(name, name)


def read_chat_template(given: str | None) -> str | None:
    """Returns the template that ``--chat-template`` gives, either as a file name or as the template
    itself, which contains a ``{``.

    Raises:
        ConfigError: the file can't be read.
    """
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--chat-template {given} can't be read: {exc}") from exc


KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Narrower data types of the KV cache, by vLLM's names."""
_CHOICES = {"kv_cache_dtype": ("auto", *KV_CACHE_DTYPES), "quantization": (None, "fp8")}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The complete configuration of an instance.

    ``kv_transfer`` configures KV transfer; None without disaggregation. ``speculative_config``
    enables draft tokens, except on a prefill instance, which samples one token per request.
    ``nodes`` says on which hosts the ranks run.
    """

    model: Path = field(
        metadata=option(
            metavar="MODEL",
            help="Hugging Face model directory, GGUF file, or ORG/NAME[@REVISION] of a hub "
            "(modelscope:ORG/NAME for ModelScope; ORG/NAME:Q4_K_M for a GGUF quantisation)",
        )
    )
    served_model_name: str = field(
        default="",
        metadata=option(
            metavar="NAME",
            nargs="+",
            default=[],
            to_field=lambda names: names[0] if names else "",
            help="model names in the API; responses and metrics carry the first one",
            default_text="the model's name, or the directory's",
        ),
    )
    generation_config: str = field(
        default="auto",
        metadata=option(
            metavar="auto|none|DIR",
            help="source of default sampling parameters, for requests that leave a parameter out: "
            "the model's generation_config.json, none, or that of another directory",
        ),
    )
    chat_template: str | None = field(
        default=None,
        metadata=option(
            metavar="FILE",
            parse=str,
            to_field=read_chat_template,
            default=None,
            help="chat template to use: a file, or the template itself in one line",
            default_text="the model's",
        ),
    )
    role: Role = field(
        default=Role.BOTH,
        metadata=option(
            help="prefill: computes prompts for decode instances; decode: continues them; "
            "both: serves whole requests"
        ),
    )
    backend: str = field(
        default="auto",
        metadata=option(metavar="NAME", help="hardware backend: auto, cpu, cuda, ascend, ..."),
    )
    device: int = field(
        default=0,
        metadata=option(
            metavar="INDEX", help="index of the first device; rank r uses the r-th from there"
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=option(
            metavar="TYPE",
            parse=read_dtype,
            help="data type of weights and activations: float32 (float), bfloat16, float16 (half); "
            "auto: the checkpoint's if the backend supports it; on a GPU or NPU the backend's "
            "preferred one for a float32 checkpoint",
        ),
    )
    quantization: str | None = field(
        default=None,
        metadata=option(
            aliases=("-q",),
            choices=("fp8",),
            help="fp8: quantise the linear layers and experts of an unquantised model while they "
            "are loaded; a draft model is not quantised",
            default_text="that of the checkpoint",
        ),
    )
    tp_size: int = field(
        default=1,
        metadata=option(
            metavar="N",
            aliases=("--tensor-parallel-size", "-tp"),
            help="number of tensor-parallel ranks of each pipeline stage",
        ),
    )
    pp_size: int = field(
        default=1,
        metadata=option(
            metavar="N",
            aliases=("--pipeline-parallel-size", "-pp"),
            help="number of pipeline stages; prompts pass through them in chunks: see "
            "--prefill-chunk-size",
        ),
    )
    dp_size: int = field(
        default=1,
        metadata=option(
            metavar="N",
            aliases=("--data-parallel-size", "-dp"),
            help="number of data-parallel ranks, each with its own requests, scheduler, KV cache "
            "and copy of the attention weights, on --tp-size times --pp-size ranks; with --ep-size "
            "they share experts",
        ),
    )
    ep_size: int = field(
        default=1,
        metadata=option(
            metavar="N",
            aliases=("--expert-parallel-size",),
            help="number of parts that a model's experts are divided into, a divisor of --dp-size "
            "times --tp-size. With --dp-size times --tp-size parts, each expert is whole on one "
            "rank; with 1, each data-parallel rank has all experts, sliced over its ranks",
        ),
    )
    ep_dispatch_min_tokens: int = field(
        default=256,
        metadata=option(
            metavar="TOKENS",
            help="with --ep-size: minimum number of tokens of a step that divides them over the "
            "ranks and dispatches them to experts; in smaller steps every rank keeps all tokens",
        ),
    )
    redundant_experts: int = field(
        default=0,
        metadata=option(
            metavar="N",
            help="with --ep-size: number of additional expert slots in each layer, for replicas of "
            "the experts with the most tokens; the number of all slots must be a multiple of "
            "--ep-size",
        ),
    )
    expert_load: Path | None = field(
        default=None,
        metadata=option(
            metavar="FILE",
            help="with --ep-size: file with the tokens of each expert, by which to place experts: "
            "the response to GET /expert_load of an instance with the same model",
            default_text="the same load for all experts",
        ),
    )
    eplb_step_interval: int = field(
        default=0,
        metadata=option(
            metavar="STEPS",
            help="with --ep-size: number of steps between new placements of experts, by the tokens "
            "of each since the last one; weights move between ranks, outputs don't change; 0 "
            "disables them",
        ),
    )
    block_size: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            help="tokens per KV block",
            default_text="16 if the backend supports it, otherwise the backend's only or preferred "
            "size; 128 on Ascend",
        ),
    )
    kv_layout: str = field(
        default="auto",
        metadata=option(
            metavar="NAME", help="memory layout of the KV cache: auto, or a name of mooncake_hal.kv"
        ),
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata=option(
            choices=("auto", *KV_CACHE_DTYPES), help="data type of the KV cache; auto: the model's"
        ),
    )
    threads: int = field(
        default=0,
        metadata=option(
            metavar="N",
            parse=positive_int,
            help="CPU threads per rank",
            default_text="the host's cores, shared evenly",
        ),
    )
    executor: ExecutorKind = field(
        default=ExecutorKind.LOCAL,
        metadata=option(help="where ranks run: processes of this host, or a Ray cluster"),
    )
    ray_address: str = field(
        default="",
        metadata=option(
            metavar="HOST:PORT",
            help="address of the Ray cluster",
            default_text="the cluster of this host, or a new one",
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=option(
            metavar="N",
            help="seed for requests without a seed of their own: the same requests in the same "
            "order get the same random numbers",
            default_text="a random seed per request",
        ),
    )
    num_kv_blocks: int | None = field(
        default=None,
        metadata=option(
            metavar="N",
            aliases=("--num-gpu-blocks-override",),
            help="number of blocks in the KV cache",
            default_text="from --kv-cache-bytes",
        ),
    )
    kv_cache_bytes: int | None = field(
        default=None,
        metadata=option(
            metavar="BYTES",
            parse=byte_count,
            help="memory for the KV cache, such as 64G",
            default_text="from --memory-utilization",
        ),
    )
    memory_utilization: float | None = field(
        default=None,
        metadata=option(
            metavar="SHARE",
            aliases=("--gpu-memory-utilization",),
            help="fraction of the device's memory to use; the KV cache gets what remains after the "
            "weights and the largest step, which a profiling run measures",
            default_text="0.9; on a CPU backend, 1 GiB for KV instead",
        ),
    )
    swap_space_bytes: int | None = field(
        default=None,
        metadata=option(
            "--swap-space",
            unit=1 << 30,
            metavar="GIB",
            help="host memory per rank, in GiB, to which preempted groups of sequences are swapped "
            "out; at most the size of the KV cache is used",
            default_text="4, but no more than a quarter of the host's free memory for all ranks",
        ),
    )
    watermark: float = field(
        default=0.01,
        metadata=option(
            metavar="SHARE",
            help="fraction of the KV blocks that stays free when a new request is scheduled, to "
            "avoid thrashing",
        ),
    )
    scheduler_delay_factor: float = field(
        default=0.0,
        metadata=option(
            metavar="TIMES",
            help="delay prompts by this factor times the duration of the last step with new "
            "prompts, so that more of them are batched; 0 schedules them at once",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS", help="maximum length of prompt and output", default_text="the model's"
        ),
    )
    max_num_seqs: int = field(
        default=256, metadata=option(metavar="N", help="maximum number of sequences in one step")
    )
    max_num_batched_tokens: int = field(
        default=2048,
        metadata=option(
            metavar="TOKENS",
            help="maximum number of tokens in one step; longer prompts run in chunks",
        ),
    )
    max_step_tokens_with_decodes: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            help="maximum number of tokens in a step with decodes: prompts share what the decodes "
            "leave, but one prompt gets at least --min-prefill-chunk",
            default_text="--max-num-batched-tokens",
        ),
    )
    target_tbt_ms: float | None = field(
        default=None,
        metadata=option(
            metavar="MS",
            help="target time between tokens while prompts run: steps with decodes get as many "
            "prompt tokens as fit into it, according to measured steps",
            default_text="no target",
        ),
    )
    min_prefill_chunk: int = field(
        default=64,
        metadata=option(
            metavar="TOKENS",
            help="minimum number of tokens of a prompt in one step; fewer at its end, or if "
            "--max-num-batched-tokens leaves fewer beside --max-num-seqs sequences; with "
            "--target-tbt-ms, a quarter of it",
        ),
    )
    prefill_chunk_size: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            help="maximum number of tokens of one prompt in one step",
            default_text="with pipeline stages, the prompt divided by their number; otherwise "
            "--max-num-batched-tokens",
        ),
    )
    max_queued_requests: int = field(
        default=1024,
        metadata=option(
            metavar="N", help="maximum number of waiting requests; more are rejected with 429"
        ),
    )
    prefix_caching: bool = field(
        default=True,
        metadata=option(
            aliases=("--no-enable-prefix-caching",),
            help="don't reuse the KV blocks of earlier requests with the same prefix",
        ),
    )
    async_scheduling: bool | None = field(
        default=None,
        metadata=option(
            help="schedule the next step while the current one runs",
            default_text="on for GPUs and NPUs, except with pipeline stages",
        ),
    )
    core_process: bool | None = field(
        default=None,
        metadata=option(
            help="run scheduler and model in a process separate from HTTP and text processing",
            default_text="on for GPUs and NPUs",
        ),
    )
    enforce_eager: bool = field(
        default=False, metadata=option(help="launch each op separately; capture no graphs")
    )
    piecewise_graph_max_tokens: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            help="run steps with prompts of up to this many tokens as piecewise graphs, with "
            "attention outside the graphs; 0 disables them",
            default_text="512 on GPUs and NPUs, 0 on a CPU backend",
        ),
    )
    step_timeout_s: float = field(
        default=300.0,
        metadata=option(
            "--step-timeout-seconds",
            metavar="SECONDS",
            help="timeout of one step, after which the instance exits: because of a hung device or "
            "a stopped rank (vLLM: VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS); 0 disables it",
        ),
    )
    kv_events: KVEventsConfig | None = field(
        default=None,
        metadata=option(
            "--kv-events-config",
            parse=str,
            to_field=read_kv_events_config,
            default=None,
            metavar="JSON",
            help="publish which blocks are cached, for routers, in vLLM's format and with its "
            'field names: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
            default_text="no events",
        ),
    )
    kv_pool: KVPoolConfig | None = field(
        default=None,
        metadata=option(
            "--kv-pool",
            parse=str,
            to_field=read_kv_pool,
            default=None,
            metavar="SETTINGS",
            help="keep KV of prompts and outputs in the KVCache pool; comma-separated settings: "
            "dram=4GiB runs a node store in this instance, with ssd=DIR:200GiB for drives and "
            "port=7701 for other instances; connect=HOST:7701 uses a running store, "
            "mooncake-store=HOST:50051 the Mooncake Store with that master; chunk=256 sets the "
            "tokens per chunk; load=always loads even chunks that are faster to compute; "
            "source-allow=10.0.0.0/8 sets the stores that requests may name; eviction, "
            "tenant-quota, ssd-write-bytes-per-day and ssd-min-free-bytes are those of "
            "mooncake-kv store",
            default_text="no pool",
        ),
    )
    kv_transfer: KVTransferConfig | None = None
    speculative_config: SpeculativeConfig | None = None
    nodes: NodeConfig = field(default_factory=NodeConfig)

    def __post_init__(self) -> None:
        check_values(self)
        for name, possible in _CHOICES.items():
            if (given := getattr(self, name)) not in possible:
                raise ConfigError(f"{name} must be one of {list(possible)}, got {given!r}")
        check_expert_options(self)
        self.nodes.check(
            self.num_all_ranks,
            {"--executor ray": self.executor is ExecutorKind.RAY, "--kv-pool": bool(self.kv_pool)},
        )
        check_kv_event_ports(self)
        check_nodes_of_data_parallel_ranks(self)
        if self.role is not Role.BOTH and self.kv_transfer is None:
            raise ConfigError(
                f"an instance of role {self.role.value!r} sends or receives KV: give it a "
                "kv_transfer configuration, or use role 'both'"
            )
        if self.speculation is not None and self.pp_size > 1:
            raise ConfigError(
                f"speculative decoding was asked for with pp_size {self.pp_size}: tokens are "
                "drafted and verified within one step, which a pipeline spreads over several; use "
                "one stage, and tensor parallelism for more ranks"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Speculative decoding of this instance; None on a prefill instance, or if it is off."""
        return None if self.role is Role.PREFILL else self.speculative_config

    @property
    def has_peers(self) -> bool:
        """Whether KV transfer or a KVCache pool accesses its KV, in addition to its own steps."""
        return self.kv_transfer is not None or self.kv_pool is not None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one data-parallel rank, in all its stages."""
        return self.tp_size * self.pp_size

    @property
    def num_all_ranks(self) -> int:
        """Number of ranks of all data-parallel ranks."""
        return self.dp_size * self.num_ranks

    @property
    def num_ranks_per_node(self) -> int:
        """Number of ranks on each host of ``nodes``."""
        return self.num_all_ranks // self.nodes.nnodes

    @property
    def has_expert_rounds(self) -> bool:
        """Whether data-parallel ranks share experts, and therefore step together."""
        return self.dp_size > 1 and self.ep_size > 1

    @property
    def allows_async_scheduling(self) -> bool:
        """Whether async scheduling is possible: the ranks that sample a token must be those that
        run it next, which is not the case with several stages."""
        return self.pp_size == 1

    @property
    def uses_async_scheduling(self) -> bool:
        """Whether a request may be scheduled again before its last token is known."""
        return bool(self.async_scheduling) and self.allows_async_scheduling

    @property
    def steps_in_flight(self) -> int:
        """Maximum number of steps in flight: with several stages, one in each and one that waits
        for the first; with async scheduling, one and the next."""
        if self.pp_size > 1:
            return self.pp_size + 1
        return 2 if self.uses_async_scheduling else 1

    @property
    def model_name(self) -> str:
        """Name under which the API serves the model."""
        return self.served_model_name or self.model.resolve().name
