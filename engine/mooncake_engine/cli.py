"""``mooncake-engine``: serve a model, generate once, start a deployment, or replay a trace."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_engine.cli_options import (
    GIB,
    KV_DEFAULTS,
    add_connector_options,
    add_engine_options,
    add_kv_transfer_options,
    add_log_level,
    add_server_options,
    count,
)
from mooncake_engine.config import (
    EngineConfig,
    ExecutorKind,
    KVTransferConfig,
    LoadFailurePolicy,
    Role,
    SpeculativeConfig,
    SpeculativeMethod,
)
from mooncake_engine.config_file import add_config_option, with_config
from mooncake_engine.errors import ConfigError, EngineError
from mooncake_engine.replay import command as replay_command
from mooncake_engine.server.options import ServerOptions
from mooncake_hal.command_help import DefaultsInHelp
from mooncake_hal.errors import HalError

if TYPE_CHECKING:
    from mooncake_engine.text.generation import Engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0, 1 for a failure, 2 for a wrong command line or config."""
    # Until there is something to leave in order, Ctrl-C ends the process as SIGTERM does: at once.
    # KeyboardInterrupt would get lost when it meets a foreign import or a finaliser.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = build_parser()
    try:
        argv = with_config(sys.argv[1:] if argv is None else argv, commands_of(parser))
    except ConfigError as exc:
        return _refuse(exc)
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        return int(args.run(args))
    except (EngineError, HalError) as exc:
        return _refuse(exc)


def _refuse(exc: Exception) -> int:
    print(f"mooncake-engine: error: {exc}", file=sys.stderr)
    return 2 if isinstance(exc, ConfigError) else 1


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parser of each command, by name."""
    [commands] = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


def build_parser() -> argparse.ArgumentParser:
    """The command line of all commands."""
    parser = argparse.ArgumentParser(prog="mooncake-engine", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, text, add_options in (
        ("serve", "serve OpenAI's API with one instance", _add_serve_options),
        ("generate", "continue a prompt, once, without a server", _add_generate_options),
        ("up", "start prefill and decode instances and a proxy", _add_up_options),
        ("bench", "replay a trace against an OpenAI endpoint", _add_bench_options),
    ):
        add_options(commands.add_parser(name, help=text, formatter_class=DefaultsInHelp))
    return parser


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", help="what to continue")
    add("--max-tokens", type=int, default=128, metavar="TOKENS", help="longest continuation")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest tokens")
    add("--seed", type=int, metavar="N", help="of the sampling (default: another one each time)")
    add("--chat", action="store_true", help="the prompt is a user's message")
    add_engine_options(parser)
    parser.set_defaults(run=_generate)


def _add_up_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _add_address_options(parser, "of the proxy")
    add("--prefill", type=count, default=1, metavar="N", help="prefill instances")
    add("--decode", type=count, default=1, metavar="N", help="decode instances")
    add("--log-dir", type=Path, metavar="DIR", help="logs go to files there (default: to stderr)")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start a part that dies again, so many times in a row; 0: its end ends all",
    )
    add(
        "--prompt",
        default="What is prefill?",
        metavar="TEXT",
        help="asked once everything is up",
    )
    add_engine_options(parser)
    add_server_options(parser)
    add_connector_options(parser)
    add_config_option(parser)
    parser.set_defaults(run=_up)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    replay_command.add_options(parser)
    add_log_level(parser, "warning")
    parser.set_defaults(run=_bench)


def _add_address_options(parser: argparse.ArgumentParser, whose: str) -> None:
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="HOST", help=f"address {whose} (:: for IPv6)")
    add("--port", type=int, default=8000, metavar="PORT", help=f"port {whose}; 0 takes a free one")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_address_options(parser, "of the API")
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.BOTH.value,
        help="which half of a request it serves",
    )
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names in the API; answers and metrics bear the first one (default: the directory's)",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="one key per line; who asks needs one"
    )
    add_engine_options(parser)
    add_server_options(parser)
    add_kv_transfer_options(parser)
    add_config_option(parser)
    parser.set_defaults(run=_serve)


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
        swap_space_bytes=int(args.swap_space * GIB),
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
    add_engine_options(options)
    add_server_options(options)
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
        connector=args.kv_connector or KV_DEFAULTS.connector,
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
    return ServerOptions(
        args.tool_call_parser, args.otlp_endpoint, args.shutdown_timeout, args.access_log
    )


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
            connector=args.kv_connector or KV_DEFAULTS.connector,
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
