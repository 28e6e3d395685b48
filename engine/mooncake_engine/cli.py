"""``mooncake-engine``: serve a model, generate once, start a deployment, or replay a trace."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_engine.config import (
    KV_CACHE_DTYPES,
    EngineConfig,
    ExecutorKind,
    KVTransferConfig,
    LoadFailurePolicy,
    Role,
    SpeculativeConfig,
    SpeculativeMethod,
)
from mooncake_engine.errors import ConfigError, EngineError
from mooncake_engine.replay import command as replay_command
from mooncake_engine.server.options import ServerOptions
from mooncake_hal.errors import HalError
from mooncake_hal.port_range import PortRange

if TYPE_CHECKING:
    from mooncake_engine.text.generation import Engine

_DEFAULTS = EngineConfig(model=Path())
_KV_DEFAULTS = KVTransferConfig()
_LOG_LEVELS = ("debug", "info", "warning", "error")
_SERVER_DEFAULTS = ServerOptions()
_GIB = 1 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for a failure, 2 for a wrong command line or config."""
    # Until there is something to leave in order, Ctrl-C ends the process as SIGTERM does: at once.
    # KeyboardInterrupt would get lost when it meets a foreign import or a finaliser.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        return int(args.run(args))
    except (EngineError, HalError) as exc:
        print(f"mooncake-engine: error: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, ConfigError) else 1


def build_parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    parser = argparse.ArgumentParser(prog="mooncake-engine", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve OpenAI's API with one instance")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument("--role", choices=[role.value for role in Role], default=Role.BOTH.value)
    serve.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names in the API; answers and metrics bear the first one",
    )
    serve.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="one key per line; who asks needs one"
    )
    _add_engine_options(serve)
    _add_server_options(serve)
    _add_kv_transfer_options(serve)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="continue a prompt, once, without a server")
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    _add_engine_options(generate)
    generate.set_defaults(run=_generate)

    up = commands.add_parser("up", help="start prefill and decode instances and a proxy")
    up.add_argument("--host", default="127.0.0.1")
    up.add_argument("--port", type=int, default=8000, help="the proxy's")
    up.add_argument("--prefill", type=_count, default=1, metavar="N", help="prefill instances")
    up.add_argument("--decode", type=_count, default=1, metavar="N", help="decode instances")
    up.add_argument("--log-dir", type=Path, help="logs go to files there instead of stderr")
    up.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a part that dies again, so many times in a row; default: 0, which ends all",
    )
    up.add_argument("--prompt", default="What is prefill?", help="asked once everything is up")
    _add_engine_options(up)
    _add_server_options(up)
    _add_connector_options(up)
    up.set_defaults(run=_up)

    bench = commands.add_parser("bench", help="replay a trace against an OpenAI endpoint")
    replay_command.add_options(bench)
    bench.add_argument("--log-level", default="warning", choices=_LOG_LEVELS)
    bench.set_defaults(run=_bench)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model directory")
    add("--backend", default=_DEFAULTS.backend, help="auto, cpu, cuda, ascend, ...")
    add("--device", type=int, default=_DEFAULTS.device, help="index of the first device")
    add("--dtype", default=_DEFAULTS.dtype, help="auto, float32, bfloat16, float16")
    add("--tp-size", type=int, default=_DEFAULTS.tp_size, help="tensor-parallel ranks")
    add("--pp-size", type=int, default=_DEFAULTS.pp_size, help="pipeline stages of such ranks")
    add(
        "--block-size",
        type=int,
        help="tokens per KV block; default: the only size that the backend takes (Ascend: 128), "
        "else 16 if it takes that, else its best",
    )
    add("--kv-layout", default=_DEFAULTS.kv_layout, help="order of the KV cache in memory")
    add(
        "--kv-cache-dtype",
        default=_DEFAULTS.kv_cache_dtype,
        choices=("auto", *KV_CACHE_DTYPES),
        help="type that KV is kept in; auto: the model's own",
    )
    add("--threads", type=_count, default=_DEFAULTS.threads, help="CPU threads per rank")
    add("--executor", default=_DEFAULTS.executor.value, choices=[e.value for e in ExecutorKind])
    add("--ray-address", default=_DEFAULTS.ray_address, metavar="HOST:PORT", help="of the cluster")
    add("--log-level", default="info", choices=_LOG_LEVELS)
    _add_memory_options(parser)
    _add_scheduling_options(parser)
    _add_speculation_options(parser)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-kv-blocks", type=int, help="size of the KV pool; default: from --kv-cache-bytes")
    add("--kv-cache-bytes", type=_byte_count, metavar="N[K|M|G]", help="memory for KV")
    add(
        "--memory-utilization",
        type=float,
        metavar="SHARE",
        help="of the device's memory; KV gets what a profiling run leaves of it. Default: 0.9, "
        "and 1 GiB for KV where the device is the host",
    )
    add(
        "--swap-space",
        type=float,
        default=_DEFAULTS.swap_space_bytes / _GIB,
        metavar="GIB",
        help="host memory per rank for preempted groups of sequences; default: 1",
    )


def _add_scheduling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--watermark",
        type=float,
        default=_DEFAULTS.watermark,
        help="share of the KV blocks kept free when requests are admitted",
    )
    add(
        "--scheduler-delay-factor",
        type=float,
        default=_DEFAULTS.scheduler_delay_factor,
        help="let prompts wait for that many times the last prompt's step",
    )
    add("--max-model-len", type=int, help="longest sequence; default: the model's")
    add("--max-num-seqs", type=int, default=_DEFAULTS.max_num_seqs, help="per step")
    add("--max-num-batched-tokens", type=int, default=_DEFAULTS.max_num_batched_tokens)
    add("--max-queued-requests", type=int, default=_DEFAULTS.max_queued_requests)
    add("--no-prefix-caching", action="store_true", help="forget the KV of finished prompts")
    add("--async-scheduling", action="store_true", help="schedule a step while the last one runs")
    add("--enforce-eager", action="store_true", help="launch every op, no graphs")
    add(
        "--piecewise-graph-max-tokens",
        type=int,
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
    add("--num-speculative-tokens", type=int, help="guesses per request and step; default: 4")
    add("--prompt-lookup-min", type=int, help="tokens that must occur again; default: 2")
    add("--prompt-lookup-max", type=int, help="tokens that are compared; default: 5")


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool-call-parser",
        default=_SERVER_DEFAULTS.tool_call_parser,
        help="auto (from the chat template), none, hermes (Qwen), llama3_json, qwen3_coder",
    )
    parser.add_argument(
        "--otlp-endpoint", metavar="URL", help="send traces there, by OTLP over HTTP"
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=_SERVER_DEFAULTS.shutdown_timeout_s,
        metavar="SECONDS",
        help="how long answers may go on after SIGTERM or Ctrl-C; a second one ends at once. "
        f"Default: {_SERVER_DEFAULTS.shutdown_timeout_s:g}",
    )


def _add_kv_transfer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-host", default=_KV_DEFAULTS.host, help="address to listen on for peers")
    add(
        "--kv-advertise-host",
        default=_KV_DEFAULTS.advertise_host,
        metavar="HOST",
        help="address that peers are told; default: --kv-host, or the address of the default "
        "route where that is 0.0.0.0 or ::",
    )
    add("--kv-port", type=int, default=_KV_DEFAULTS.port, help="side channel; 0 takes a free port")
    add(
        "--kv-port-range",
        type=_port_range,
        metavar="FIRST-LAST",
        help="where free ports are taken from, by transports and side channel; default: anywhere",
    )
    _add_connector_options(parser)
    add("--kv-secret-file", type=Path, help="file with the deployment's secret")
    add("--lease-seconds", type=float, default=_KV_DEFAULTS.lease_s)
    add("--transfer-timeout-seconds", type=float, default=_KV_DEFAULTS.transfer_timeout_s)
    add(
        "--kv-load-failure",
        choices=[policy.value for policy in LoadFailurePolicy],
        default=_KV_DEFAULTS.load_failure.value,
        help="what becomes of a request whose KV does not arrive",
    )


def _add_connector_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-connector", help=f"default: {_KV_DEFAULTS.connector}, for prefill and decode"
    )
    parser.add_argument(
        "--transport",
        action="append",
        default=[],
        metavar="NAME",
        help="shm, tcp, rdma, ...; repeat in order of preference; default: the best of all",
    )


def engine_config(args: argparse.Namespace, kv_transfer: KVTransferConfig | None) -> EngineConfig:
    """The engine's part of a command line.

    Raises:
        ConfigError: a value that can't be, or no model directory.
    """
    if not (args.model / "config.json").is_file():
        raise ConfigError(
            f"--model must be a Hugging Face model directory: no config.json in {args.model}"
        )
    return EngineConfig(
        model=args.model,
        served_model_name=next(iter(getattr(args, "served_model_name", ())), ""),
        role=Role(getattr(args, "role", Role.BOTH.value)),
        backend=args.backend,
        device=args.device,
        dtype=args.dtype,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        block_size=args.block_size,
        kv_layout=args.kv_layout,
        kv_cache_dtype=args.kv_cache_dtype,
        num_kv_blocks=args.num_kv_blocks,
        kv_cache_bytes=args.kv_cache_bytes,
        memory_utilization=args.memory_utilization,
        swap_space_bytes=int(args.swap_space * _GIB),
        watermark=args.watermark,
        scheduler_delay_factor=args.scheduler_delay_factor,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_queued_requests=args.max_queued_requests,
        prefix_caching=not args.no_prefix_caching,
        async_scheduling=args.async_scheduling,
        enforce_eager=args.enforce_eager,
        piecewise_graph_max_tokens=args.piecewise_graph_max_tokens,
        kv_transfer=kv_transfer,
        speculative_config=speculative_config(args),
        threads=args.threads,
        executor=ExecutorKind(args.executor),
        ray_address=args.ray_address,
    )


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig | None:
    """How tokens are guessed ahead; None for not at all.

    Raises:
        ConfigError: the options contradict each other.
    """
    wanted = {
        "model": args.speculative_model,
        "num_speculative_tokens": args.num_speculative_tokens,
        "prompt_lookup_min": args.prompt_lookup_min,
        "prompt_lookup_max": args.prompt_lookup_max,
    }
    options = {name: value for name, value in wanted.items() if value is not None}
    if args.speculative_model and not (args.speculative_model / "config.json").is_file():
        raise ConfigError(
            "--speculative-model must be a Hugging Face model directory: no config.json in "
            f"{args.speculative_model}"
        )
    if args.speculative_method is not None:
        return SpeculativeConfig(SpeculativeMethod(args.speculative_method), **options)
    if options:
        raise ConfigError(_without_method(list(options)))
    return None


def _without_method(names: list[str]) -> str:
    """What to add to options about guessing that don't say what guesses."""
    flags = ["--speculative-model" if name == "model" else _flag(name) for name in names]
    if "model" in names:
        method = f"--speculative-method {SpeculativeMethod.DRAFT.value}"
    elif names == ["num_speculative_tokens"]:
        method = f"--speculative-method, one of {', '.join(SpeculativeMethod)}"
    else:
        method = f"--speculative-method {SpeculativeMethod.NGRAM.value}"
    return f"{', '.join(flags)} without --speculative-method: no tokens are guessed; add {method}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def engine_argv(args: argparse.Namespace) -> tuple[str, ...]:
    """The instances' part of a command line again, as far as it differs from the defaults. Without
    ``--threads``, the instances of a deployment share the CPUs evenly."""
    options = argparse.ArgumentParser(add_help=False)
    _add_engine_options(options)
    _add_server_options(options)
    wanted = vars(args)
    if not args.threads:
        num_instances = args.prefill + args.decode
        wanted = {**wanted, "threads": max(1, (os.cpu_count() or 1) // num_instances)}
    argv: list[str] = []
    for option in options._actions:
        value = wanted[option.dest]
        if value is True:
            argv.append(option.option_strings[0])
        elif value not in (None, False, option.default):
            argv += [option.option_strings[0], str(value)]
    return tuple(argv)


def kv_transfer_config(args: argparse.Namespace) -> KVTransferConfig | None:
    """How KV moves; None for an instance that works alone."""
    if args.kv_connector is None and args.role == Role.BOTH.value:
        return None
    return KVTransferConfig(
        connector=args.kv_connector or _KV_DEFAULTS.connector,
        host=args.kv_host,
        advertise_host=args.kv_advertise_host,
        port=args.kv_port,
        port_range=args.kv_port_range,
        transports=tuple(args.transport),
        secret=_secret(args.kv_secret_file),
        lease_s=args.lease_seconds,
        transfer_timeout_s=args.transfer_timeout_seconds,
        load_failure=LoadFailurePolicy(args.kv_load_failure),
    )


def _secret(path: Path | None) -> str:
    """Read from a file, because a command line is visible to everybody on the host."""
    if path is None:
        return ""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"can't read --kv-secret-file: {exc}") from exc
    if not secret:
        raise ConfigError(f"--kv-secret-file {path} is empty; put the deployment's secret there")
    return secret


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, got {text!r}")
    return count


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


def _serve(args: argparse.Namespace) -> int:
    from mooncake_engine.server.access import read_keys
    from mooncake_engine.server.run import serve

    options = replace(
        _server_options(args),
        api_keys=read_keys(args.api_key_file),
        model_aliases=tuple(args.served_model_name[1:]),
    )
    config = engine_config(args, kv_transfer_config(args))
    serve(config, args.host, args.port, _start_engine, options)
    return 0


def _server_options(args: argparse.Namespace) -> ServerOptions:
    return ServerOptions(args.tool_call_parser, args.otlp_endpoint, args.shutdown_timeout)


def _start_engine(config: EngineConfig) -> Engine:
    """Only here is torch imported: what can be refused without it is refused at once."""
    from mooncake_engine.async_engine import AsyncEngine
    from mooncake_engine.progress import ProgressBar

    return AsyncEngine.start(config, ProgressBar())


def _generate(args: argparse.Namespace) -> int:
    from mooncake_engine.llm import LLM
    from mooncake_engine.sampling_params import SamplingParams

    sampling = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    with LLM.from_config(engine_config(args, None)) as llm:
        if args.chat:
            outputs = llm.chat([{"role": "user", "content": args.prompt}], sampling)
        else:
            outputs = llm.generate(args.prompt, sampling)
    print(outputs[0].outputs[0].text)
    return 0


def _up(args: argparse.Namespace) -> int:
    from mooncake_engine.launch import Deployment, up

    engine_config(args, None)  # refuse what every instance would refuse
    options = _server_options(args)
    up(
        Deployment(
            host=args.host,
            port=args.port,
            num_prefill=args.prefill,
            num_decode=args.decode,
            engine_argv=engine_argv(args),
            transports=tuple(args.transport),
            connector=args.kv_connector or _KV_DEFAULTS.connector,
            log_dir=args.log_dir,
            prompt=args.prompt,
            otlp_endpoint=args.otlp_endpoint,
            shutdown_timeout_s=options.shutdown_timeout_s,
            max_restarts=args.max_restarts,
        )
    )
    return 0


def _bench(args: argparse.Namespace) -> int:
    print(replay_command.bench(args).table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
