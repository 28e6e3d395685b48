"""The options of ``mooncake-engine``'s commands, in the groups that commands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from mooncake_engine.config import (
    KV_CACHE_DTYPES,
    EngineConfig,
    ExecutorKind,
    KVTransferConfig,
    LoadFailurePolicy,
    SpeculativeMethod,
)
from mooncake_engine.server.options import ACCESS_LOGS, ServerOptions
from mooncake_hal.port_range import PortRange

LOG_LEVELS = ("debug", "info", "warning", "error")
GIB = 1 << 30
KV_DEFAULTS = KVTransferConfig()
_DEFAULTS = EngineConfig(model=Path())
_SERVER_DEFAULTS = ServerOptions()


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What every command that loads a model takes."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory")
    add("--backend", default=_DEFAULTS.backend, metavar="NAME", help="auto, cpu, cuda, ascend, ...")
    add("--device", type=int, default=_DEFAULTS.device, metavar="INDEX", help="the first device")
    add("--dtype", default=_DEFAULTS.dtype, metavar="TYPE", help="auto, float32, bfloat16, float16")
    add("--tp-size", type=int, default=_DEFAULTS.tp_size, metavar="N", help="tensor-parallel ranks")
    add("--pp-size", type=int, default=_DEFAULTS.pp_size, metavar="N", help="stages of such ranks")
    add(
        "--block-size",
        type=int,
        metavar="TOKENS",
        help="per KV block (default: the only size that the backend takes, which is 128 on Ascend; "
        "else 16 if it takes that, else its best)",
    )
    add(
        "--kv-layout",
        default=_DEFAULTS.kv_layout,
        metavar="NAME",
        help="order of the KV cache in memory",
    )
    add(
        "--kv-cache-dtype",
        default=_DEFAULTS.kv_cache_dtype,
        choices=("auto", *KV_CACHE_DTYPES),
        help="type that KV is kept in; auto: the model's own",
    )
    add(
        "--threads",
        type=count,
        default=_DEFAULTS.threads,
        metavar="N",
        help="CPU threads per rank (default: the cores, shared evenly)",
    )
    add(
        "--executor",
        default=_DEFAULTS.executor.value,
        choices=[kind.value for kind in ExecutorKind],
        help="where the ranks run: on this host, or on a Ray cluster",
    )
    add(
        "--ray-address",
        default=_DEFAULTS.ray_address,
        metavar="HOST:PORT",
        help="of the cluster (default: this host's, or a new one)",
    )
    add_log_level(parser, "info")
    _add_memory_options(parser)
    _add_scheduling_options(parser)
    _add_speculation_options(parser)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--num-kv-blocks",
        type=int,
        metavar="N",
        help="size of the KV pool (default: from --kv-cache-bytes)",
    )
    add(
        "--kv-cache-bytes",
        type=_byte_count,
        metavar="N[K|M|G]",
        help="memory for KV (default: from --memory-utilization)",
    )
    add(
        "--memory-utilization",
        type=float,
        metavar="SHARE",
        help="of the device's memory; KV gets what a profiling run leaves of it "
        "(default: 0.9; on a host, 1 GiB for KV instead)",
    )
    add(
        "--swap-space",
        type=float,
        default=_DEFAULTS.swap_space_bytes / GIB,
        metavar="GIB",
        help="host memory per rank for preempted groups of sequences",
    )


def _add_scheduling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--watermark",
        type=float,
        default=_DEFAULTS.watermark,
        metavar="SHARE",
        help="of the KV blocks, kept free when requests are admitted",
    )
    add(
        "--scheduler-delay-factor",
        type=float,
        default=_DEFAULTS.scheduler_delay_factor,
        metavar="TIMES",
        help="let prompts wait for that many times the last prompt's step",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest sequence (default: the model's)",
    )
    add(
        "--max-num-seqs",
        type=int,
        default=_DEFAULTS.max_num_seqs,
        metavar="N",
        help="sequences per step",
    )
    add(
        "--max-num-batched-tokens",
        type=int,
        default=_DEFAULTS.max_num_batched_tokens,
        metavar="TOKENS",
        help="per step; longer prompts run in chunks",
    )
    add(
        "--max-queued-requests",
        type=int,
        default=_DEFAULTS.max_queued_requests,
        metavar="N",
        help="may wait before new ones are refused",
    )
    add("--no-prefix-caching", action="store_true", help="forget the KV of finished prompts")
    add("--async-scheduling", action="store_true", help="schedule a step while the last one runs")
    add("--enforce-eager", action="store_true", help="launch every op, no graphs")
    add(
        "--piecewise-graph-max-tokens",
        type=int,
        metavar="TOKENS",
        help="replay steps with prompts of up to so many tokens, all but their attention; 0: none "
        "(default: 512 on a device with memory of its own)",
    )


def _add_speculation_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speculative-method",
        choices=[method.value for method in SpeculativeMethod],
        help="guess tokens ahead: by what followed the same tokens before, or with a draft model",
    )
    add("--speculative-model", type=Path, metavar="DIR", help="the draft model")
    for flag, text in (
        ("--num-speculative-tokens", "guesses per request and step (default: 4)"),
        ("--prompt-lookup-min", "that must occur again (default: 2)"),
        ("--prompt-lookup-max", "that are compared (default: 5)"),
    ):
        add(flag, type=int, metavar="TOKENS", help=text)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """What every command that serves takes."""
    parser.add_argument(
        "--tool-call-parser",
        default=_SERVER_DEFAULTS.tool_call_parser,
        metavar="NAME",
        help="auto (from the chat template), none, hermes (Qwen), llama3_json, qwen3_coder",
    )
    parser.add_argument(
        "--otlp-endpoint", metavar="URL", help="send traces there, by OTLP over HTTP"
    )
    parser.add_argument(
        "--access-log",
        default=_SERVER_DEFAULTS.access_log,
        choices=ACCESS_LOGS,
        help="a line of JSON per request on stderr",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=_SERVER_DEFAULTS.shutdown_timeout_s,
        metavar="SECONDS",
        help="how long answers may go on after SIGTERM or Ctrl-C; a second one ends at once",
    )


def add_kv_transfer_options(parser: argparse.ArgumentParser) -> None:
    """Of an instance whose KV moves."""
    add = parser.add_argument
    add(
        "--kv-host",
        default=KV_DEFAULTS.host,
        metavar="HOST",
        help="address to listen on for peers",
    )
    add(
        "--kv-advertise-host",
        default=KV_DEFAULTS.advertise_host,
        metavar="HOST",
        help="address that peers are told (default: --kv-host, or the address of the default "
        "route where that is 0.0.0.0 or ::)",
    )
    add(
        "--kv-port",
        type=int,
        default=KV_DEFAULTS.port,
        metavar="PORT",
        help="side channel; 0 takes a free one",
    )
    add(
        "--kv-port-range",
        type=_port_range,
        metavar="FIRST-LAST",
        help="where free ports are taken from, by transports and side channel (default: anywhere)",
    )
    add_connector_options(parser)
    add("--kv-secret-file", type=Path, metavar="FILE", help="with the deployment's secret")
    add(
        "--lease-seconds",
        type=float,
        default=KV_DEFAULTS.lease_s,
        metavar="SECONDS",
        help="how long finished KV is kept for a peer that says nothing",
    )
    add(
        "--transfer-timeout-seconds",
        type=float,
        default=KV_DEFAULTS.transfer_timeout_s,
        metavar="SECONDS",
        help="how long KV may take to arrive; the same on both sides",
    )
    add(
        "--kv-load-failure",
        choices=[policy.value for policy in LoadFailurePolicy],
        default=KV_DEFAULTS.load_failure.value,
        help="what becomes of a request whose KV does not arrive",
    )


def add_connector_options(parser: argparse.ArgumentParser) -> None:
    """How KV moves, the same for all instances."""
    parser.add_argument(
        "--kv-connector",
        metavar="NAME",
        help="how KV moves between prefill and decode instances "
        f"(default: {KV_DEFAULTS.connector})",
    )
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="shm, tcp, rdma, ...; repeat in order of preference (default: the best of all)",
    )


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    """What every command takes."""
    parser.add_argument(
        "--log-level", default=default, choices=LOG_LEVELS, help="least severe lines on stderr"
    )


def count(text: str) -> int:
    """A number that is at least 1; the type of such an option."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, got {text!r}")
    return number


def _port_range(text: str) -> PortRange:
    try:
        return PortRange.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _byte_count(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1] if unit > 1 else text) * unit)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted bytes such as 512M or 4G, got {text!r}") from None
