"""Where an instance listens."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from mooncake_proxy.errors import ConfigError

_WANTED = "wanted http://HOST:PORT or https://HOST:PORT"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an instance listens. `prefix` is a path in front of `/v1/...`, usually empty."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """`http://host:port[/prefix]`, `https://...`, or `host:port`; IPv6 in brackets.

        ConfigError for anything else.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as exc:
            raise ConfigError(f"instance URL {url!r}: {exc}; {_WANTED}") from exc
        if "://" not in url and port is None:
            raise ConfigError(f"instance URL {url!r}: neither scheme nor port; {_WANTED}")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"instance URL {url!r}: {_WANTED}")
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(f"instance URL {url!r}: user, query and fragment have no place in it")
        default = 443 if parts.scheme == "https" else 80
        return cls(parts.scheme, parts.hostname, port or default, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """`host:port` as it stands in URLs and Host headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"
