"""API keys: the keys file, and the checks of requests' keys."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from mooncake_api.instance_protocol import MIN_KEY_CHARACTERS
from mooncake_proxy.errors import DECODE_ERRORS, ConfigError, Unauthorized

logger = logging.getLogger(__name__)
STRUCTURED = (".json", ".yaml", ".yml")


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the keys file.

    Args:
        key: the bearer token.
        name: stands for the key in metrics, logs and errors; required for keys with limits.
        classes: request classes that it may use (``X-Request-Class``), the default first; empty:
            any.
        weight: weight of its share in the admission queue.
        requests_per_minute: rate limit of requests; 0: none.
        tokens_per_minute: rate limit of tokens; 0: none.
        models: models that it may use; empty: all.
    """

    key: str
    name: str = ""
    classes: tuple[str, ...] = ()
    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    models: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        is_limited = self.requests_per_minute or self.tokens_per_minute
        if not self.key or (is_limited and not self.name):
            raise ValueError(f"wanted a key, and with limits a name: found {self.name!r}")
        if self.weight <= 0 or min(self.requests_per_minute, self.tokens_per_minute) < 0:
            raise ValueError(f"{self.name!r}: wanted a weight above 0 and limits from 0 on")


class KeyClass(Struct, frozen=True, forbid_unknown_fields=True):
    """Objectives of a request class: milliseconds, or multiples of the unloaded time ("5x")."""

    ttft: str | int | float = "inf"
    tbt: str | int | float = "inf"
    best_effort: bool = False


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a keys file."""

    keys: tuple[ApiKey, ...] = ()
    classes: dict[str, KeyClass] = {}

    @property
    def accepted(self) -> frozenset[str]:
        """All keys."""
        return frozenset(each.key for each in self.keys)

    @property
    def tenants(self) -> tuple[ApiKey, ...]:
        """The entries that have a name."""
        return tuple(each for each in self.keys if each.name)


@dataclass(frozen=True, slots=True)
class NoKey:
    """Stands for the key if the proxy requires none."""

    name: str = ""
    weight: float = 1.0


def read_key_file(path: str | None) -> KeyFile:
    """Read a keys file: structured YAML or JSON by its extension, otherwise one key per line.

    Raises:
        ConfigError: it can't be read, contains no key, or contains a key or name twice.
    """
    if path is None:
        return KeyFile()
    if not path.endswith(STRUCTURED):
        return KeyFile(tuple(ApiKey(key) for key in sorted(read_keys(path))))
    try:
        data = Path(path).read_bytes()
        decode = msgspec.json.decode if path.endswith(".json") else msgspec.yaml.decode
        found = decode(data, type=KeyFile)
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}") from exc
    except ImportError as exc:
        raise ConfigError(
            f"key file {path}: YAML needs PyYAML (pip install PyYAML); "
            "a file that ends in .json needs nothing"
        ) from exc
    except (*DECODE_ERRORS, AttributeError) as exc:
        # PyYAML raises AttributeError for a bad `!!timestamp`.
        raise ConfigError(f"key file {path}: {exc}") from exc
    if not found.keys:
        raise ConfigError(f"key file {path} holds no key: no client could send requests")
    for what in ("key", "name"):
        values = [value for each in found.keys if (value := getattr(each, what))]
        if len(set(values)) < len(values):
            raise ConfigError(f"key file {path}: a {what} is given twice")
    _warn_of_short_keys(path, (each.key for each in found.keys))
    return found


def read_keys(path: str | None) -> frozenset[str]:
    """Read a file with one key per line. Empty lines and `#` comments are skipped."""
    if path is None:
        return frozenset()
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as exc:
        raise ConfigError(f"key file {path}: {exc.strerror}; wanted one key per line") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"key file {path}: {exc}; wanted one key per line") from exc
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"key file {path} holds no key: wanted one per line")
    _warn_of_short_keys(path, keys)
    return keys


def _warn_of_short_keys(path: str, keys: Iterable[str]) -> None:
    if num_short := sum(len(key) < MIN_KEY_CHARACTERS for key in keys):
        logger.warning(
            "key file %s: %d of its keys have fewer than %d characters, and may be guessed; "
            "openssl rand -hex 32 makes a better one",
            path,
            num_short,
            MIN_KEY_CHARACTERS,
        )


def bearer_token(headers: dict[bytes, bytes]) -> bytes | None:
    """The API key that a request sends as OpenAI's or Anthropic's clients do; None without one."""
    if b"authorization" not in headers:
        return headers.get(b"x-api-key")
    scheme, _, token = headers[b"authorization"].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def holds_key(headers: dict[bytes, bytes], keys: frozenset[str]) -> bool:
    """Whether the request's API key is one of `keys`."""
    given = bearer_token(headers)
    # All keys are compared, each in constant time, so that timing reveals nothing about them.
    matches = [hmac.compare_digest(given or b"", key.encode()) for key in keys]
    return given is not None and any(matches)


def check_key(headers: dict[bytes, bytes], keys: frozenset[str]) -> None:
    """Raise Unauthorized unless the request's API key is one of `keys`, or `keys` is empty."""
    if keys and not holds_key(headers, keys):
        raise Unauthorized(
            "wrong or missing API key: send Authorization: Bearer KEY, or x-api-key: KEY"
        )


def tenant_salt(headers: dict[bytes, bytes], own: str | None) -> str:
    """The `cache_salt` of a client: the same for all requests with one API key.

    The key can't be derived from it. The client's `own` salt, if any, divides its cache further.
    """
    key = headers.get(b"authorization", b"").partition(b" ")[2].strip()
    key = key or headers.get(b"x-api-key", b"")
    salt = blake2b(key, digest_size=16, person=b"cache_salt")
    if own:
        salt.update(b"\0" + own.encode("utf-8", "replace"))
    return salt.hexdigest()
