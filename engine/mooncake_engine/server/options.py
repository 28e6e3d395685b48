"""How the API in front of an engine is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from mooncake_engine.errors import ConfigError
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_engine.text.tool_forms import PARSERS, detect_parser

AUTO, NONE = "auto", "none"
ACCESS_LOGS = ("off", "errors", "all")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What is set about the API, beside the engine.

    Args:
        tool_call_parser: form in which the model calls tools: a name in ``PARSERS``, ``auto`` to
            read it from the chat template, or ``none``.
        otlp_endpoint: where traces go (OTLP over HTTP); None for none.
        shutdown_timeout_s: how long answers may go on after a stop. Some seconds less than the 30
            that Kubernetes and others give by default.
        api_keys: one of these is needed to generate; none for everybody.
        access_log: which requests get a line: ``off``, ``errors`` or ``all``.
        model_aliases: names that the model is served under, beside its own.

    Raises:
        ConfigError: an unknown form, an endpoint that is no http or https URL, or a negative time.
    """

    tool_call_parser: str = AUTO
    otlp_endpoint: str | None = None
    shutdown_timeout_s: float = 25.0
    access_log: str = "off"
    api_keys: frozenset[str] = frozenset()
    model_aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = [AUTO, NONE, *PARSERS]
        if self.tool_call_parser not in known:
            raise ConfigError(
                f"--tool-call-parser must be one of {', '.join(known)}, "
                f"got {self.tool_call_parser!r}"
            )
        if self.otlp_endpoint is not None and not _is_http_url(self.otlp_endpoint):
            raise ConfigError(
                "--otlp-endpoint must be the URL of a collector such as http://collector:4318, "
                f"got {self.otlp_endpoint!r}"
            )

        if not 0.0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(
                "--shutdown-timeout must be a number of seconds, at least 0, "
                f"got {self.shutdown_timeout_s:g}"
            )

    def tool_format(self, tokenizer: Tokenizer) -> str | None:
        """The form in which this model calls tools; None if it can't."""
        if self.tool_call_parser == AUTO:
            return detect_parser(tokenizer.chat_template)
        return None if self.tool_call_parser == NONE else self.tool_call_parser


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or an IPv6 address is cut off
        return False
