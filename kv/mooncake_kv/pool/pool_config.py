"""The ``--kv-pool`` option: which stores an instance saves to and loads from."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mooncake_hal.options import byte_count, port_number, positive_int
from mooncake_kv.allowed_hosts import AllowedHosts
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_kv.store.eviction import DEFAULT_POLICY, POLICIES

DEFAULT_CHUNK_TOKENS = 256
DEFAULT_STAGING_BYTES = 256 << 20
DEFAULT_SSD_MIN_FREE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class KVPoolConfig:
    """How one instance uses the pool.

    The instance saves to the first store: its own if it has one, else the first of ``connect``, or
    while that can't be reached the next one that can.

    Args:
        dram_bytes: memory of a store in this instance; 0 for no such store. With ``mooncake_store``
            the memory that this instance contributes to that pool.
        ssd: SSD directories of that store, with the bytes to use of each.
        policy: eviction policy of that store, a key of ``eviction.POLICIES``.
        quotas: upper bound of its memory in bytes, by tenant.
        ssd_write_bytes_per_day: write budget of all its SSDs; 0 for no limit.
        ssd_min_free_bytes: free space to leave on each of their file systems.
        port: port on which that store listens for other instances; 0 for a free port, None not to
            listen.
        connect: host and port of stores in other processes.
        source_allow: hosts, addresses and networks of the stores that a request may name, or ``*``
            for all. Empty: stores on any host that know the deployment's secret; without a secret,
            stores of this host.
        mooncake_store: HOST:PORT of the ``mooncake_master`` of a Mooncake Store, to use in place of
            node stores; empty for none.
        staging_bytes: memory of this instance for chunks in transit to and from a Mooncake Store.
        protocol: transfer protocol of a Mooncake Store: tcp or rdma.
        metadata: metadata server of that store's transfer engines, such as
            ``http://10.0.0.1:8080/metadata``, the same for all its clients; empty for none.
        devices: RDMA devices to use for it; empty for all.
        chunk_tokens: tokens per chunk, a multiple of the block size; must be the same in all
            instances that share KV.
        always_loads: whether to load all chunks that are found, even where recomputing them is
            estimated to be faster.
        network: addresses, secret, transports and timeouts.

    Raises:
        KVConfigError: no store is configured, an option does not apply to the configured kind of
            store, or ``source_allow`` has an invalid host.
    """

    dram_bytes: int = 0
    ssd: tuple[tuple[Path, int], ...] = ()
    policy: str = DEFAULT_POLICY
    quotas: tuple[tuple[str, int], ...] = ()
    ssd_write_bytes_per_day: int = 0
    ssd_min_free_bytes: int = DEFAULT_SSD_MIN_FREE_BYTES
    port: int | None = None
    connect: tuple[tuple[str, int], ...] = ()
    source_allow: tuple[str, ...] = ()
    mooncake_store: str = ""
    staging_bytes: int = DEFAULT_STAGING_BYTES
    protocol: str = "tcp"
    metadata: str = ""
    devices: tuple[str, ...] = ()
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    always_loads: bool = False
    network: KVTransferConfig = field(default_factory=KVTransferConfig)

    def __post_init__(self) -> None:
        AllowedHosts(self.source_allow, "--kv-pool: source-allow")
        self._check_own_store()
        if self.mooncake_store:
            if self.ssd or self.connect or self.port is not None:
                raise KVConfigError(
                    "--kv-pool: ssd, port and connect apply to node stores only; with "
                    "mooncake-store=... the master places KV: use dram, staging, protocol, "
                    "metadata and device"
                )
            return
        of_mooncake = (self.staging_bytes, self.protocol, self.metadata, self.devices)
        if of_mooncake != (DEFAULT_STAGING_BYTES, "tcp", "", ()):
            raise KVConfigError(
                "--kv-pool: staging, protocol, metadata and device apply to a Mooncake Store only; "
                "add its master: mooncake-store=10.0.0.1:50051"
            )
        if not self.dram_bytes and not self.connect:
            raise KVConfigError(
                "--kv-pool names no store: give this instance one (dram=4GiB), or connect to a "
                "running one (connect=127.0.0.1:7701)"
            )
        if not self.dram_bytes and (self.ssd or self.port is not None):
            raise KVConfigError(
                "--kv-pool: ssd and port apply to a store in this instance, which needs memory: "
                "add dram=4GiB"
            )

    def _check_own_store(self) -> None:
        """Check that options of a node store in this instance are given only if it has one.

        Raises:
            KVConfigError: it has none.
        """
        of_ssd = {
            "ssd-write-bytes-per-day": self.ssd_write_bytes_per_day != 0,
            "ssd-min-free-bytes": self.ssd_min_free_bytes != DEFAULT_SSD_MIN_FREE_BYTES,
        }
        of_store = {"eviction": self.policy != DEFAULT_POLICY, "tenant-quota": bool(self.quotas)}
        given = [name for name, is_given in (of_store | of_ssd).items() if is_given]
        if given and (self.mooncake_store or not self.dram_bytes):
            raise KVConfigError(
                f"--kv-pool: {', '.join(given)}: apply to a node store in this instance, which has "
                "none; a store in another process has options of the same names"
            )
        if any(of_ssd.values()) and not self.ssd:
            raise KVConfigError(
                f"--kv-pool: {', '.join(name for name in given if name in of_ssd)}: there is no "
                "SSD; add a directory: ssd=/ssd0/kv:200GiB"
            )

    def with_network(self, network: KVTransferConfig) -> KVPoolConfig:
        """A copy with another network configuration."""
        return replace(self, network=network)


def read_kv_pool(text: str) -> KVPoolConfig:
    """Parse ``--kv-pool``: settings separated by commas. ``ssd``, ``tenant-quota``, ``connect``,
    ``device`` and ``source-allow`` may be repeated.

        dram=4GiB
        dram=4GiB,ssd=/ssd0/kv:200GiB,port=7701,connect=10.0.0.2:7701
        connect=127.0.0.1:7701
        mooncake-store=10.0.0.1:50051,dram=4GiB

    Raises:
        KVConfigError: a setting is unknown or invalid.
    """
    found: dict[str, Any] = {}
    for setting in text.split(","):
        name, sign, value = setting.strip().partition("=")
        if not sign or name not in _SETTINGS:
            raise KVConfigError(
                f"--kv-pool: wanted {', '.join(f'{known}=...' for known in _SETTINGS)} separated "
                f"by commas, got {setting!r}"
            )
        field_name, parse, is_repeated = _SETTINGS[name]
        try:
            parsed = parse(value)
        except (ValueError, argparse.ArgumentTypeError) as exc:
            raise KVConfigError(f"--kv-pool: {name}: {exc}") from exc
        if is_repeated:
            parsed = (*found.get(field_name, ()), parsed)
        elif field_name in found:
            raise KVConfigError(f"--kv-pool: {name} is given twice")
        found[field_name] = parsed
    return KVPoolConfig(**found)


def ssd_directory(text: str) -> tuple[Path, int]:
    """Parse a directory and the bytes to use of it, such as ``/ssd0/kv:200GiB``."""
    path, colon, size = text.rpartition(":")
    if not colon or not path:
        raise argparse.ArgumentTypeError(f"wanted DIR:BYTES such as /ssd0/kv:200GiB, got {text!r}")
    return Path(path), byte_count(size)


def tenant_quota(text: str) -> tuple[str, int]:
    """Parse a tenant and its bytes of memory, such as ``team-a=8GiB``."""
    tenant, sign, size = text.rpartition("=")
    if not sign or not tenant:
        raise argparse.ArgumentTypeError(f"wanted TENANT=BYTES such as a=8GiB, got {text!r}")
    return tenant, byte_count(size)


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise ValueError(f"wanted one of {', '.join(POLICIES)}, got {text!r}")
    return text


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"wanted HOST:PORT such as 127.0.0.1:7701, got {text!r}")
    number = port_number(port)
    if not number:
        raise ValueError(f"wanted a port, 1 to 65535, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), number


def _master(text: str) -> str:
    if "://" in text:  # several masters behind etcd, in Mooncake's clients
        raise ValueError(f"wanted HOST:PORT of one master, got {text!r}")
    return host_and_port(*_address(text))


def host_and_port(host: str, port: int) -> str:
    """Format host and port as in a URL, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError(f"wanted tcp or rdma, got {text!r}")
    return text


def _is_always(text: str) -> bool:
    if text not in ("always", "faster"):
        raise ValueError(f"wanted always or faster, got {text!r}")
    return text == "always"


_SETTINGS: dict[str, tuple[str, Callable[[str], Any], bool]] = {
    "dram": ("dram_bytes", byte_count, False),
    "ssd": ("ssd", ssd_directory, True),
    "port": ("port", port_number, False),
    "connect": ("connect", _address, True),
    "mooncake-store": ("mooncake_store", _master, False),
    "staging": ("staging_bytes", byte_count, False),
    "protocol": ("protocol", _protocol, False),
    "metadata": ("metadata", str, False),
    "device": ("devices", str, True),
    "chunk": ("chunk_tokens", positive_int, False),
    "load": ("always_loads", _is_always, False),
    "source-allow": ("source_allow", str, True),
    "eviction": ("policy", _policy, False),
    "tenant-quota": ("quotas", tenant_quota, True),
    "ssd-write-bytes-per-day": ("ssd_write_bytes_per_day", byte_count, False),
    "ssd-min-free-bytes": ("ssd_min_free_bytes", byte_count, False),
}
"""The settings by name: field of ``KVPoolConfig``, parser, and whether it may be repeated."""
