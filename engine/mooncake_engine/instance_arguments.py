"""The options of an instance on a command line: parses them into configurations, and turns them
back into command lines for the instances that ``mooncake-engine up`` starts."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from mooncake_engine.checkpoints.model_source import find_model
from mooncake_engine.config import EngineConfig, ExecutorKind, Role
from mooncake_engine.errors import ConfigError
from mooncake_engine.node_config import NodeConfig
from mooncake_engine.process.device_division import InstanceNeeds, device_options
from mooncake_engine.server.server_options import OF_ONE_INSTANCE, ServerOptions
from mooncake_engine.speculative_config import SpeculativeConfig, SpeculativeMethod
from mooncake_hal.command_line import LOG_FORMATS
from mooncake_hal.options import Option, add_to_parser, from_arguments, options_of
from mooncake_kv.config import KVTransferConfig

LOG_LEVEL = Option(
    flag="--log-level",
    default="info",
    choices=("debug", "info", "warning", "error"),
    help="minimum severity of log lines on stderr",
)
LOG_FORMAT = Option(
    flag="--log-format",
    default="text",
    choices=LOG_FORMATS,
    help="format of log lines on stderr: text, or one JSON object per line, in every process",
)
LOGGING = (LOG_LEVEL, LOG_FORMAT)
CONNECTOR_OPTIONS = options_of(KVTransferConfig, only=("connector", "transports"))
INSTANCE_OPTIONS = (
    *options_of(EngineConfig, without=("role",)),
    *options_of(SpeculativeConfig),
    *LOGGING,
    *options_of(ServerOptions, without=OF_ONE_INSTANCE),
)
"""Options that apply to every instance of a deployment, unless ``--prefill-args`` or
``--decode-args`` override them for one role."""
ROLE_OPTIONS = (
    *INSTANCE_OPTIONS,
    *options_of(KVTransferConfig, without=("connector", "transports", "secret")),
)
"""Options that may differ between the roles of a deployment."""
_OF_PROXY = ("access_log", "allowed_origins", "log_level", "max_body_bytes")


def engine_config(args: argparse.Namespace, kv_transfer: KVTransferConfig | None) -> EngineConfig:
    """Returns the engine's configuration; fetches the model if it is given by name.

    Raises:
        ConfigError: a value is invalid, or the model does not exist.
        DownloadFailed: the model can't be fetched.
    """
    find_models(args)
    from mooncake_engine.kv_connector import engine_errors

    with engine_errors():
        config = from_arguments(
            EngineConfig,
            args,
            kv_transfer=kv_transfer,
            speculative_config=speculative_config(args),
            nodes=from_arguments(NodeConfig, args),
        )
        if config.kv_pool is not None:
            network = kv_transfer or from_arguments(KVTransferConfig, args)
            config = replace(config, kv_pool=config.kv_pool.with_network(network))
    return config


def find_models(args: argparse.Namespace) -> None:
    """Replace the names of models by directories on this host. If no ``--served-model-name`` is
    given, the name of the model becomes that.

    Raises:
        ConfigError, DownloadFailed, CheckpointError: see ``find_model``.
    """
    found = find_model(args.model)
    is_served_by_name = getattr(args, "served_model_name", None) == []
    if is_served_by_name and found.name != found.directory.resolve().name:
        args.served_model_name = [found.name]
    args.model = found.directory
    if args.speculative_model is not None:
        args.speculative_model = find_model(args.speculative_model, "--speculative-model").directory


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig | None:
    """Returns the configuration of speculative decoding; None if it is off.

    Raises:
        ConfigError: the options contradict each other.
    """
    if args.speculative_method is not None:
        return from_arguments(SpeculativeConfig, args)
    options = options_of(SpeculativeConfig)
    given = [option for option in options if getattr(args, option.name) is not None]
    if not given:
        return None
    fields = [option.field for option in given]
    if "model" in fields:
        method = f"--speculative-method {SpeculativeMethod.DRAFT.value}"
    elif set(fields) <= {"num_speculative_tokens", "disable_by_batch_size"}:
        method = f"--speculative-method, one of {', '.join(SpeculativeMethod)}"
    else:
        method = f"--speculative-method {SpeculativeMethod.NGRAM.value}"
    raise ConfigError(
        f"{', '.join(option.flag for option in given)} without --speculative-method: no tokens are "
        f"drafted; add {method}"
    )


def engine_argv(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options for all instances of a deployment that differ from their defaults.
    Without ``--threads``, all ranks of the instances share the CPUs evenly."""
    wanted = vars(args)
    if not args.threads:
        num_ranks = (args.prefill + args.decode) * args.tp_size * args.pp_size * args.dp_size
        wanted = {**wanted, "threads": max(1, len(os.sched_getaffinity(0)) // num_ranks)}
    return _words(INSTANCE_OPTIONS, wanted)


def proxy_argv(args: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options that differ from their defaults and that the proxy of a deployment needs
    as well, because clients talk to it; then those of ``--proxy-args``.

    Raises:
        ConfigError: a quotation in ``--proxy-args`` does not end.
    """
    shared = tuple(each for each in INSTANCE_OPTIONS if each.name in _OF_PROXY)
    return (*_words(shared, vars(args)), *_split("--proxy-args", args.proxy_args))


def _split(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(f"{flag}: {exc}") from exc


def _words(options: Sequence[Option], values: Mapping[str, Any]) -> tuple[str, ...]:
    given = [option for option in options if values[option.name] != option.default]
    return tuple(word for option in given for word in option.words(values[option.name]))


def role_argv(args: argparse.Namespace, role: Role) -> tuple[str, ...]:
    """Returns the options of one role's instances, which follow those of ``engine_argv``.

    Raises:
        ConfigError: ``serve`` would reject them; the message names the option.
    """
    from mooncake_engine.kv_connector import engine_errors

    flag = f"--{role.value}-args"
    words, parsed = _role_arguments(args, role)
    try:
        engine_config(parsed, None)
        from_arguments(ServerOptions, parsed)
        with engine_errors():
            from_arguments(KVTransferConfig, parsed)
    except ConfigError as exc:
        raise ConfigError(f"{flag}: {exc}") from exc
    return tuple(words)


def _role_arguments(args: argparse.Namespace, role: Role) -> tuple[list[str], argparse.Namespace]:
    """Returns the words of a role's ``--ROLE-args``, and all parsed options of its instances."""
    flag = f"--{role.value}-args"
    words = _split(flag, getattr(args, f"{role.value}_args"))
    parser = _RoleParser(flag)
    add_to_parser(parser, ROLE_OPTIONS)
    return words, parser.parse_args([*engine_argv(args), *words])


def device_argv(args: argparse.Namespace) -> tuple[tuple[str, ...], ...]:
    """Returns the device options of each instance of a deployment, prefill instances first.

    Raises:
        ConfigError: the host has too few devices for an instance.
    """
    instances = []
    for role, count in ((Role.PREFILL, args.prefill), (Role.DECODE, args.decode)):
        _, found = _role_arguments(args, role)
        memory = (found.memory_utilization, found.kv_cache_bytes, found.num_kv_blocks)
        needs = InstanceNeeds(
            found.backend,
            found.dp_size * found.tp_size * found.pp_size,
            has_device=bool(found.device) or found.executor == ExecutorKind.RAY.value,
            has_memory=any(value is not None for value in memory),
        )
        instances += [needs] * count
    return tuple(device_options(instances))


class _RoleParser(argparse.ArgumentParser):
    """A parser that raises ConfigError instead of exiting."""

    def __init__(self, flag: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self._flag = flag

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self._flag}: {message}; these are options of mooncake-engine serve")


def kv_transfer_config(args: argparse.Namespace) -> KVTransferConfig | None:
    """Returns the configuration of KV transfer; None without disaggregation.

    Raises:
        ConfigError: the secret can't be read, or the connector does not exist.
    """
    from mooncake_engine.kv_connector import engine_errors, find_connector

    if args.kv_connector is None and args.role == Role.BOTH.value:
        return None
    with engine_errors():
        config = from_arguments(KVTransferConfig, args)
    find_connector(config.connector)
    return config
