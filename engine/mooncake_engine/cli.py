"""``mooncake-engine``: serve a model, generate once, start a deployment, or replay a trace."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mooncake_engine.config import EngineConfig, Role
from mooncake_engine.config_file import CONFIG_FILE, with_config
from mooncake_engine.errors import ConfigError, EngineError, EngineStuck, PortInUse
from mooncake_engine.instance_arguments import (
    CONNECTOR_OPTIONS,
    INSTANCE_OPTIONS,
    LOG_FORMAT,
    LOG_LEVEL,
    LOGGING,
    ROLE_OPTIONS,
    device_argv,
    engine_argv,
    engine_config,
    kv_transfer_config,
    proxy_argv,
    role_argv,
)
from mooncake_engine.node_config import NodeConfig
from mooncake_engine.process.queued_stderr import queued_stderr
from mooncake_engine.server.server_options import ServerOptions
from mooncake_engine.speculative_config import SpeculativeConfig
from mooncake_engine.vllm_flags import with_model_flag, without_vllm_flags
from mooncake_hal import __version__  # one of all our packages
from mooncake_hal.command_line import (
    CommandParser,
    DefaultsInHelp,
    LogSettings,
    load_development_module,
)
from mooncake_hal.errors import DevelopmentToolsMissing, HalError
from mooncake_hal.options import (
    Option,
    add_to_parser,
    from_arguments,
    markdown_table,
    options_of,
    positive_int,
)
from mooncake_kv.config import KVTransferConfig

_REPLAY_COMMAND = "mooncake_engine.replay.replay_command"
_SERVING_COMMAND = "mooncake_engine.replay.serving_command"
_SERVING_OPTIONS = "mooncake_engine.replay.serving_options"


def _address_options(of_what: str) -> tuple[Option, ...]:
    return (
        Option(
            flag="--host",
            default="127.0.0.1",
            metavar="HOST",
            help=f"address of the {of_what} (:: for IPv6)",
        ),
        Option(
            flag="--port",
            parse=int,
            default=8000,
            metavar="PORT",
            help=f"port of the {of_what}; 0 takes a free one",
        ),
    )


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the program.

    Args:
        name, help: its name and its line in the list of commands.
        run: runs the command with the parsed arguments; returns the exit status.
        options: its options.
        add_arguments: adds further arguments to its parser, such as positional ones.
    """

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...] = ()
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add its arguments to a parser."""
        if self.add_arguments is not None:
            self.add_arguments(parser)
        add_to_parser(parser, self.options)
        parser.set_defaults(run=self.run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0, 1 for a failure or a port in use, 2 for a wrong command line or
        configuration.
    """
    # Until there is something to clean up, Ctrl-C ends the process at once, as SIGTERM does: a
    # KeyboardInterrupt would get lost in the import of a foreign module or in a finaliser.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        argv = with_model_flag(sys.argv[1:] if argv is None else argv, ("serve", "up"))
        if argv[:2] == ["bench", "serve"]:
            argv = ["bench serve", *argv[2:]]
        argv = with_config(argv, OPTIONS, SECTIONS)
    except ConfigError as exc:
        return _refuse(exc)
    parser = build_parser(argv)
    args, unknown = parser.parse_known_args(argv)
    LogSettings(logging.getLevelName(args.log_level.upper()), args.log_format).apply()
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        if args.run in (_serve, _up):
            unknown = without_vllm_flags(unknown)
        if unknown and args.run in (_bench, _bench_serve):
            load_development_module(_REPLAY_COMMAND)  # if it is missing, so are its options
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return int(args.run(args))
    except EngineStuck as exc:
        _refuse(exc)
        logging.shutdown()
        os._exit(1)  # a normal exit would wait for the thread that hangs
    except (EngineError, HalError) as exc:
        return _refuse(exc)


def _refuse(exc: Exception) -> int:
    print(f"mooncake-engine: error: {exc}", file=sys.stderr)
    # Service managers restart the program after status 1, but not after 2: a port becomes free.
    return 2 if isinstance(exc, ConfigError) and not isinstance(exc, PortInUse) else 1


def build_parser(words: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Returns the parser of all commands.

    Args:
        words: words of the command line. Commands that are not among them are listed without their
            options, so that the modules of these options are not imported; None adds all options.
    """
    parser = CommandParser(prog="mooncake-engine", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        of_command = parsers.add_parser(
            command.name, help=command.help, formatter_class=DefaultsInHelp
        )
        if words is None or command.name in words:
            command.add_to(of_command)
    return parser


def _serve(args: argparse.Namespace) -> int:
    from mooncake_engine.async_engine import EngineLoad
    from mooncake_engine.process.progress_bar import ProgressBar
    from mooncake_engine.server.api_server import serve
    from mooncake_engine.server.api_workers import serve_with_workers
    from mooncake_engine.text.tokenizer import block_torch_import

    aliases = tuple(args.served_model_name[1:])
    options = from_arguments(ServerOptions, args, model_aliases=aliases)
    config = engine_config(args, kv_transfer_config(args))
    if config.nodes.node_rank:
        from mooncake_engine.execution.node_process import run_node

        with queued_stderr():
            run_node(config, options.shutdown_timeout_s)
        return 0
    block_torch_import()
    with queued_stderr():
        if options.api_workers > 1:
            serve_with_workers(config, args.host, args.port, options, ProgressBar())
        else:
            load_engine = partial(EngineLoad, on_progress=ProgressBar())
            serve(config, args.host, args.port, load_engine, options)
    return 0


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
    from mooncake_engine.process.local_deployment import LocalDeployment, up

    config = engine_config(args, None)  # reject now what every instance would reject
    options = from_arguments(ServerOptions, args)
    deployment = LocalDeployment(
        host=args.host,
        port=args.port,
        num_prefill=args.prefill,
        num_decode=args.decode,
        engine_argv=engine_argv(args),
        prefill_argv=role_argv(args, Role.PREFILL),
        decode_argv=role_argv(args, Role.DECODE),
        transports=tuple(args.transport),
        connector=args.kv_connector or KVTransferConfig().connector,
        log_dir=args.log_dir,
        prompt=args.prompt,
        otlp_endpoint=args.otlp_endpoint,
        shutdown_timeout_s=options.shutdown_timeout_s,
        max_restarts=args.max_restarts,
        kv_pool=config.kv_pool,
        log_format=args.log_format,
        proxy_argv=proxy_argv(args),
        slo_ttft_ms=options.slo_ttft_ms,
        slo_tbt_ms=options.slo_tbt_ms,
        device_argv=device_argv(args),
    )
    with queued_stderr():
        up(deployment)
    return 0


def _development_options(module: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        with suppress(DevelopmentToolsMissing):  # reported when the command is run
            load_development_module(module).add_options(parser)

    return add


def _bench(args: argparse.Namespace) -> int:
    print(load_development_module(_REPLAY_COMMAND).bench(args).table())
    return 0


def _bench_serve(args: argparse.Namespace) -> int:
    print(load_development_module(_SERVING_COMMAND).bench_serve(args))
    return 0


def _run_batch(args: argparse.Namespace) -> int:
    from mooncake_engine.process.batch_runner import BatchRun, authorization, run_batch
    from mooncake_engine.process.progress_bar import ProgressBar

    batch = BatchRun(
        args.url,
        args.input_file,
        args.output_file,
        concurrency=args.concurrency,
        max_attempts=args.max_attempts,
        headers=authorization(),
    )
    print(run_batch(batch, ProgressBar()))
    return 0


def _collect_env(args: argparse.Namespace) -> int:
    from mooncake_hal.cli import main as hal_main

    return hal_main(["collect-env", *(["--json"] if args.json else [])])


def _options(args: argparse.Namespace) -> int:
    print(markdown_table(OPTIONS[args.of]), end="")
    return 0


def _add_command_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", choices=("serve", "generate", "up"), help="the command")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="text to complete")


COMMANDS = (
    Command(
        "serve",
        "serve the OpenAI API with one instance",
        _serve,
        (
            *_address_options("API"),
            *options_of(EngineConfig),
            *options_of(NodeConfig),
            *options_of(SpeculativeConfig),
            *LOGGING,
            *options_of(ServerOptions),
            *options_of(KVTransferConfig),
            CONFIG_FILE,
        ),
    ),
    Command(
        "generate",
        "complete one prompt, without a server",
        _generate,
        (
            Option(
                flag="--max-tokens",
                parse=int,
                default=128,
                metavar="TOKENS",
                help="maximum number of tokens to generate",
            ),
            Option(
                flag="--temperature",
                parse=float,
                default=0.0,
                metavar="T",
                help="sampling temperature; 0 chooses the most probable token",
            ),
            Option(
                flag="--seed",
                parse=int,
                metavar="N",
                help="sampling seed",
                default_text="a random one",
            ),
            Option(
                flag="--chat", is_switch=True, default=False, help="the prompt is a user message"
            ),
            *options_of(EngineConfig, without=("role", "served_model_name", "seed")),
            *options_of(SpeculativeConfig),
            *LOGGING,
        ),
        _add_prompt,
    ),
    Command(
        "up",
        "start prefill and decode instances and a proxy",
        _up,
        (
            *_address_options("proxy"),
            Option(
                flag="--prefill",
                parse=positive_int,
                default=1,
                metavar="N",
                help="number of prefill instances",
            ),
            Option(
                flag="--decode",
                parse=positive_int,
                default=1,
                metavar="N",
                help="number of decode instances",
            ),
            *(
                Option(
                    flag=f"--{role}-args",
                    default="",
                    metavar="OPTIONS",
                    help=f"options of serve for {role} instances only, in one argument: "
                    f'--{role}-args="--tp-size 2"; in a config file, a section of that name',
                )
                for role in ("prefill", "decode")
            ),
            Option(
                flag="--proxy-args",
                default="",
                metavar="OPTIONS",
                help="options of mooncake-proxy, in one argument: "
                '--proxy-args="--policy cost --api-key-file keys"',
            ),
            Option(
                flag="--log-dir",
                parse=Path,
                metavar="DIR",
                help="directory for log files, one per process",
                default_text="logs go to stderr",
            ),
            Option(
                flag="--max-restarts",
                parse=int,
                default=0,
                metavar="N",
                help="maximum number of consecutive restarts of a process that dies; with 0, the "
                "deployment stops",
            ),
            Option(
                flag="--prompt",
                default="What is prefill?",
                metavar="TEXT",
                help="prompt to send once everything is running",
            ),
            *INSTANCE_OPTIONS,
            *CONNECTOR_OPTIONS,
            CONFIG_FILE,
        ),
    ),
    Command(
        "run-batch",
        "send a file of requests as batch work, behind interactive requests",
        _run_batch,
        (
            Option(
                flag="--url",
                is_required=True,
                metavar="URL",
                help="URL of a proxy or an instance, with or without /v1",
            ),
            Option(
                flag="--input-file",
                parse=Path,
                is_required=True,
                metavar="FILE",
                help="requests, in OpenAI's batch format: JSON lines with custom_id, url and body",
            ),
            Option(
                flag="--output-file",
                parse=Path,
                is_required=True,
                metavar="FILE",
                help="file to append results to; requests that it answers already are skipped",
            ),
            Option(
                flag="--concurrency",
                parse=positive_int,
                default=32,
                metavar="N",
                help="maximum number of requests in flight",
            ),
            Option(
                flag="--max-attempts",
                parse=positive_int,
                default=5,
                metavar="N",
                help="maximum number of attempts of a request that fails; one that the server "
                "rejects for the time being (429, 503) is retried until it is accepted",
            ),
            replace(LOG_LEVEL, default="warning"),
            LOG_FORMAT,
        ),
    ),
    Command(
        "bench",
        "replay a trace against an OpenAI endpoint",
        _bench,
        (replace(LOG_LEVEL, default="warning"), LOG_FORMAT),
        _development_options(_REPLAY_COMMAND),
    ),
    Command(
        "bench serve",
        "send the load of vLLM's bench serve to an OpenAI endpoint",
        _bench_serve,
        (replace(LOG_LEVEL, default="warning"), LOG_FORMAT),
        _development_options(_SERVING_OPTIONS),
    ),
    Command(
        "collect-env",
        "print the environment for a bug report: versions, devices, RDMA, limits",
        _collect_env,
        (
            Option(flag="--json", is_switch=True, default=False, help="print JSON"),
            *LOGGING,
        ),
    ),
    Command(
        "options",
        "print the options of a command as a table in Markdown",
        _options,
        LOGGING,
        _add_command_name,
    ),
)
OPTIONS = {command.name: command.options for command in COMMANDS}
"""The options of each command, by its name."""
SECTIONS = {f"{role}_args": ROLE_OPTIONS for role in ("prefill", "decode")}
"""Options whose value in a file is a section with options of its own."""


if __name__ == "__main__":
    sys.exit(main())
