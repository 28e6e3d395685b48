"""``ServerOptions``: the options of the HTTP server, each with its command-line flag."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_api.instance_protocol import (
    MIN_KEY_CHARACTERS,
    is_http_url,
    is_origin,
    split_origins,
)
from mooncake_engine.config_checks import check_url
from mooncake_engine.errors import ConfigError
from mooncake_engine.process.worker_counts import MAX_WORKERS
from mooncake_engine.text.reasoning import REASONING_PARSERS, detect_reasoning
from mooncake_engine.text.tool_call_forms import PARSERS, detect_parser
from mooncake_hal.options import byte_count, option, read_secret_file

if TYPE_CHECKING:
    from mooncake_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
ACCESS_LOGS = ("off", "errors", "all")
OF_ONE_INSTANCE = (
    "api_keys",
    *("register", "register_secret", "register_url", "register_lease_s"),
)
"""Options that ``mooncake-engine up`` does not pass to the instances of a local deployment."""


def read_keys(path: Path | None) -> frozenset[str]:
    """The API keys in a file, one per line; empty lines and ``#`` comments are skipped. Without a
    file there are no keys. Short ones are accepted with a warning.

    Raises:
        ConfigError: the file can't be read, or holds no key, which would lock out all clients.
    """
    if path is None:
        return frozenset()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"can't read --api-key-file: {exc}") from exc
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; put one per line")
    if num_short := sum(len(key) < MIN_KEY_CHARACTERS for key in keys):
        logger.warning(
            "%d of the keys in --api-key-file %s have fewer than %d characters, and may be "
            "guessed; openssl rand -hex 32 makes a better one",
            num_short,
            path,
            MIN_KEY_CHARACTERS,
        )
    return keys


def read_register_secret(path: Path | None) -> str:
    """The secret for ``--register``; empty without a file.

    Raises:
        ConfigError: the file can't be read, is empty, or holds a secret that is too short.
    """
    if path is None:
        return ""
    advice = "put the shared secret there"
    return read_secret_file(path, "--register-secret-file", advice, ConfigError)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of the API server, as opposed to those of the engine.

    ``api_keys``: clients need one of these to generate; empty disables the check.
    ``model_aliases``: additional names under which the model is served. ``shutdown_timeout_s``: the
    default is some seconds less than the 30 that Kubernetes and others allow. ``worker``: the name
    of this process among the API workers; empty where there is only one.

    Raises:
        ConfigError: an unknown parser, an endpoint that is not an http or https URL, or a number
            out of range.
    """

    tool_call_parser: str = field(
        default=AUTO,
        metadata=option(
            metavar="NAME",
            help="format of tool calls: auto (from the chat template), none, hermes (Qwen), "
            "llama3_json, qwen3_coder, deepseek_v3 (V3, R1), deepseek_v31, mistral",
        ),
    )
    reasoning_parser: str = field(
        default=AUTO,
        metadata=option(
            choices=(AUTO, NONE, *REASONING_PARSERS),
            help="whether to separate reasoning in <think> tags from the answer: auto (if the chat "
            "template has the tags), none, qwen3 or deepseek_r1 (always)",
        ),
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata=option(
            metavar="URL", help="collector to which to send OpenTelemetry traces, OTLP over HTTP"
        ),
    )
    shutdown_timeout_s: float = field(
        default=25.0,
        metadata=option(
            "--shutdown-timeout",
            metavar="SECONDS",
            help="how long running requests may continue after SIGTERM or Ctrl-C; a second signal "
            "stops at once",
        ),
    )
    access_log: str = field(
        default="off",
        metadata=option(choices=ACCESS_LOGS, help="write one JSON line per request to stderr"),
    )
    api_keys: frozenset[str] = field(
        default=frozenset(),
        metadata=option(
            "--api-key-file",
            metavar="FILE",
            parse=Path,
            to_field=read_keys,
            default=None,
            help="file with API keys, one per line; requests without one of them are rejected",
        ),
    )
    allowed_origins: tuple[str, ...] = field(
        default=(),
        metadata=option(
            metavar="ORIGINS",
            parse=split_origins,
            help="origins of web pages that may use the API in a browser (CORS), separated by "
            "commas, such as https://chat.example.com; *: all",
        ),
    )
    max_body_bytes: int | None = field(
        default=None,
        metadata=option(
            "--max-body-bytes",
            metavar="BYTES",
            parse=byte_count,
            help="largest request body, such as 16M; a larger one is rejected (default: one prompt "
            "of the context's length plus 8 MiB, at most 64 MiB)",
        ),
    )
    slo_ttft_ms: float | None = field(
        default=None,
        metadata=option(
            "--slo-ttft",
            metavar="MS",
            help="latency objective for metrics: time to first token in ms",
        ),
    )
    slo_tbt_ms: float | None = field(
        default=None,
        metadata=option(
            "--slo-tbt",
            metavar="MS",
            help="latency objective for metrics: time between tokens in ms, which nine in ten gaps "
            "of an answer must meet",
        ),
    )
    log_stats_interval_s: float = field(
        default=10.0,
        metadata=option(
            "--log-stats-interval",
            metavar="SECONDS",
            help="interval of the log lines with throughput, queues and KV usage; 0 disables them",
        ),
    )
    api_workers: int = field(
        default=1,
        metadata=option(
            metavar="N",
            aliases=("--api-server-count", "-asc"),
            help="processes that serve the API; with more than one, scheduler and model run in a "
            "process of their own",
        ),
    )
    enable_tokenizer_info_endpoint: bool = field(
        default=False,
        metadata=option(
            help="serve GET /tokenizer_info: the tokenizer's configuration, chat template included"
        ),
    )
    register: tuple[str, ...] = field(
        default=(),
        metadata=option(
            is_repeated=True,
            metavar="URL",
            help="register this instance with the proxy at this URL (its --admin-port if it has "
            "one); may be repeated",
        ),
    )
    register_secret: str = field(
        default="",
        metadata=option(
            "--register-secret-file",
            metavar="FILE",
            parse=Path,
            to_field=read_register_secret,
            default=None,
            help="file with the secret of --register, the same as the proxy's",
        ),
    )
    register_url: str | None = field(
        default=None,
        metadata=option(
            metavar="URL",
            help="URL at which proxies reach this instance (default: --host and --port)",
        ),
    )
    register_lease_s: float = field(
        default=15.0,
        metadata=option(
            "--register-lease",
            metavar="SECONDS",
            help="how long a proxy keeps this instance without a renewal",
        ),
    )
    model_aliases: tuple[str, ...] = ()
    worker: str = ""

    def __post_init__(self) -> None:
        known = [AUTO, NONE, *PARSERS]
        if self.tool_call_parser not in known:
            raise ConfigError(
                f"--tool-call-parser must be one of {', '.join(known)}, "
                f"got {self.tool_call_parser!r}"
            )
        if self.otlp_endpoint is not None and not is_http_url(self.otlp_endpoint):
            raise ConfigError(
                "--otlp-endpoint must be the URL of a collector such as http://collector:4318, "
                f"got {self.otlp_endpoint!r}"
            )
        for origin in self.allowed_origins:
            if not is_origin(origin):
                raise ConfigError(
                    "--allowed-origins must be * or origins of web pages, such as "
                    f"https://chat.example.com, got {origin!r}"
                )
        self._check_numbers()
        self._check_registration()

    def _check_registration(self) -> None:
        for flag, urls in (("--register", self.register), ("--register-url", [self.register_url])):
            for url in urls:
                if url is not None:
                    check_url(flag, url)
        if bool(self.register) is not bool(self.register_secret):
            raise ConfigError(
                "--register and --register-secret-file go together: the proxies to register with, "
                "and the secret that this instance shares with them"
            )
        if not 1 <= self.register_lease_s <= 600:
            raise ConfigError(
                f"--register-lease must be 1 to 600 seconds, got {self.register_lease_s:g}"
            )

    def _check_numbers(self) -> None:
        if not 1 <= self.api_workers <= MAX_WORKERS:
            raise ConfigError(
                f"--api-workers must be from 1 to {MAX_WORKERS}, got {self.api_workers}"
            )
        for flag, limit in (("--slo-ttft", self.slo_ttft_ms), ("--slo-tbt", self.slo_tbt_ms)):
            if limit is not None and not 0.0 < limit < math.inf:
                raise ConfigError(f"{flag} must be a number of ms, more than 0, got {limit:g}")
        if self.max_body_bytes is not None and self.max_body_bytes < 1:
            raise ConfigError(f"--max-body-bytes must be at least 1, got {self.max_body_bytes}")
        if not 0.0 <= self.log_stats_interval_s < math.inf:
            raise ConfigError(
                "--log-stats-interval must be a number of seconds, at least 0, "
                f"got {self.log_stats_interval_s:g}"
            )
        if not 0.0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(
                "--shutdown-timeout must be a number of seconds, at least 0, "
                f"got {self.shutdown_timeout_s:g}"
            )

    def has_reasoning(self, tokenizer: Tokenizer) -> bool:
        """Whether answers of this model are parsed for reasoning."""
        if self.reasoning_parser == AUTO:
            return detect_reasoning(tokenizer.chat_template)
        return self.reasoning_parser != NONE

    def tool_format(self, tokenizer: Tokenizer) -> str | None:
        """The name of the format in which this model calls tools; None if it can't."""
        if self.tool_call_parser == AUTO:
            return detect_parser(tokenizer.chat_template)
        return None if self.tool_call_parser == NONE else self.tool_call_parser
