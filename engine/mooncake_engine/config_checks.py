"""Checks of an EngineConfig: bounds of single options, and options that exclude or need each other;
and of URLs, which several commands take.

Every check raises ConfigError, with the option, the value that was found, and what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_api.instance_protocol import is_http_url
from mooncake_engine.errors import ConfigError

if TYPE_CHECKING:
    from mooncake_engine.config import EngineConfig

_POSITIVE = (
    *("dp_size", "tp_size", "pp_size", "ep_size", "ep_dispatch_min_tokens", "block_size"),
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("max_step_tokens_with_decodes", "min_prefill_chunk", "prefill_chunk_size"),
)
_NOT_NEGATIVE = (
    *("swap_space_bytes", "scheduler_delay_factor", "redundant_experts", "eplb_step_interval"),
    *("piecewise_graph_max_tokens", "max_queued_requests"),
)


def check_values(config: EngineConfig) -> None:
    """Check the bounds of single options."""
    _check_step_timeout(config.step_timeout_s)
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    for name in _NOT_NEGATIVE:
        if (value := getattr(config, name) or 0) < 0:
            raise ConfigError(f"{name} must not be negative, got {value}")
    if config.target_tbt_ms is not None and config.target_tbt_ms <= 0:
        raise ConfigError(f"target_tbt_ms must be above 0, got {config.target_tbt_ms:g}")
    if not 0 <= config.watermark < 1:
        raise ConfigError(f"watermark must be in [0, 1), got {config.watermark}")
    if config.memory_utilization is not None and not 0 < config.memory_utilization <= 1:
        raise ConfigError(f"memory_utilization must be in (0, 1], got {config.memory_utilization}")


def check_expert_options(config: EngineConfig) -> None:
    """Check that experts can be divided over the ranks, and that options which place them have an
    effect."""
    if config.dp_size * config.tp_size % config.ep_size:
        raise ConfigError(
            f"ep_size {config.ep_size} was asked for with dp_size {config.dp_size} and tp_size "
            f"{config.tp_size}: experts are divided over the ranks of a stage; use a divisor of "
            "dp_size times tp_size, or their product itself"
        )
    is_placing = config.redundant_experts or config.expert_load or config.eplb_step_interval
    if config.ep_size == 1 and is_placing:
        raise ConfigError(
            "redundant_experts, expert_load and eplb_step_interval place experts that are "
            "divided over ranks: they need an ep_size above 1"
        )


def check_kv_event_ports(config: EngineConfig) -> None:
    """Check that the configured address has a port for each publisher of KV events."""
    has_store = config.kv_pool is not None and config.kv_pool.dram_bytes > 0
    num_publishers = config.dp_size + has_store
    if config.kv_events is not None and (why := config.kv_events.port_conflict(num_publishers)):
        raise ConfigError(why)


def check_nodes_of_data_parallel_ranks(config: EngineConfig) -> None:
    """Check that each node has whole data-parallel ranks, or each of these has whole nodes."""
    if config.dp_size == 1:
        return
    per_node = config.num_ranks_per_node
    if per_node % config.tp_size and config.tp_size % per_node:
        raise ConfigError(
            f"--nnodes {config.nodes.nnodes} gives each node {per_node} ranks, of --dp-size "
            f"{config.dp_size} and --tp-size {config.tp_size}: parts of two data-parallel ranks "
            "would be on one node; choose sizes so that a node has whole ones, or that one has "
            "whole nodes"
        )


def _check_step_timeout(seconds: float) -> None:
    """Check the timeout. An idle step waits up to half a second for requests, so a shorter timeout
    would end an idle instance."""
    if not (seconds == 0 or 1 <= seconds <= 86_400):
        raise ConfigError(
            f"step_timeout_s must be 0, which is no limit, or 1 to 86400 seconds, got {seconds:g}"
        )


def check_url(option: str, url: str) -> None:
    """Check that a URL names an HTTP server; ``option`` is the option that has set it."""
    if not is_http_url(url):
        raise ConfigError(f"{option} must be http://HOST:PORT or https://…, got {url!r}")
