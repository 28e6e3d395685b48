"""KVTransferConfig: every option of KV transfer, the address advertised to peers included."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mooncake_hal.options import option, port_range, read_secret_file
from mooncake_hal.port_range import PortRange
from mooncake_kv.errors import KVConfigError


class LoadFailurePolicy(str, Enum):
    """What a decode instance does with a request whose KV could not be loaded."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


def read_secret(path: Path) -> str:
    """Read a deployment's secret, or several, one per line, from a file.

    Raises:
        KVConfigError: the file can't be read, is empty, or holds a secret that is too short.
    """
    advice = "put the deployment's secret there"
    return read_secret_file(path, "--kv-secret-file", advice, KVConfigError)


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How KV moves between instances. The help text of each field's option documents the field.

    ``api_port`` is the port of the instance's own API, which transports must not use; 0: none.
    """

    connector: str = field(
        default="MooncakeConnector",
        metadata=option(
            "--kv-connector",
            is_unset_by_default=True,
            metavar="NAME",
            help="how KV moves between prefill and decode instances: MooncakeConnector (decode "
            "pulls), MooncakeLayerwiseConnector (prefill pushes layer by layer), or another "
            "connector's class as package.module:Class",
        ),
    )
    host: str = field(
        default="127.0.0.1",
        metadata=option(
            "--kv-host",
            metavar="HOST",
            help="address that the side channel and transports listen on",
        ),
    )
    advertise_host: str = field(
        default="",
        metadata=option(
            "--kv-advertise-host",
            metavar="HOST",
            help="address that peers connect to",
            default_text="--kv-host; where that is 0.0.0.0 or ::, the address of the default route",
        ),
    )
    port: int = field(
        default=0,
        metadata=option(
            "--kv-port", metavar="PORT", help="port of the side channel; 0 takes a free one"
        ),
    )
    port_range: PortRange | None = field(
        default=None,
        metadata=option(
            "--kv-port-range",
            parse=port_range,
            metavar="FIRST-LAST",
            help="range from which the side channel and the transports of all ranks take free "
            "ports",
            default_text="any port",
        ),
    )
    api_port: int = 0
    transports: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "--transport",
            is_repeated=True,
            metavar="NAME",
            help="transport for KV: shm, tcp, rdma, ...; repeat it in order of preference",
            default_text="the best one that both ends have",
        ),
    )
    secret: str = field(
        default="",
        metadata=option(
            "--kv-secret-file",
            parse=Path,
            to_field=read_secret,
            default=None,
            metavar="FILE",
            help="file with the secret that all instances of a deployment share; with several, one "
            "per line, the first proves, and all are accepted",
        ),
    )
    allow_no_secret: bool = field(
        default=False,
        metadata=option(
            "--kv-allow-no-secret",
            help="listen on other addresses than loopback without --kv-secret-file: anyone who can "
            "reach them may read and write KV",
        ),
    )
    lease_s: float = field(
        default=30.0,
        metadata=option(
            "--lease-seconds",
            metavar="SECONDS",
            help="how long a prefill instance keeps finished KV without a message from the peer",
        ),
    )
    transfer_timeout_s: float = field(
        default=30.0,
        metadata=option(
            "--transfer-timeout-seconds",
            metavar="SECONDS",
            help="deadline of one request's KV transfer; the same on both sides",
        ),
    )
    push_timeout_s: float = field(
        default=300.0,
        metadata=option(
            "--push-timeout-seconds",
            metavar="SECONDS",
            help="how long a decode instance waits for the KV of a prompt that is pushed to it, "
            "prefill included",
        ),
    )
    early_pull_timeout_s: float = field(
        default=300.0,
        metadata=option(
            "--early-pull-timeout-seconds",
            metavar="SECONDS",
            help="how long a decode instance waits for the KV of a prompt that it pulls early, "
            "prefill included",
        ),
    )
    metaserver_allow: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "--metaserver-allow",
            is_repeated=True,
            metavar="HOST",
            help="host, address or network (10.0.0.0/8) that a request may name as its metaserver; "
            "repeat it; * allows any",
            default_text="the host that sent the request",
        ),
    )
    load_failure: LoadFailurePolicy = field(
        default=LoadFailurePolicy.RECOMPUTE,
        metadata=option(
            "--kv-load-failure", help="what to do with a request whose KV could not be loaded"
        ),
    )

    def __post_init__(self) -> None:
        for flag, seconds in (
            ("--lease-seconds", self.lease_s),
            ("--transfer-timeout-seconds", self.transfer_timeout_s),
            ("--push-timeout-seconds", self.push_timeout_s),
            ("--early-pull-timeout-seconds", self.early_pull_timeout_s),
        ):
            if not 0 < seconds <= 86_400:
                raise KVConfigError(f"{flag} must be in (0, 86400], got {seconds:g}")
