"""The configuration of KV events: vLLM's ``--kv-events-config``.

Separate from the publisher, so that parsing a command line does not import ZeroMQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import Enum

import msgspec

from mooncake_kv.errors import KVConfigError

_NUMBERED = re.compile(r"(tcp://.*:)(\d+)$")


class EventPublisherKind(str, Enum):
    """The kind of publisher."""

    NULL = "null"
    ZMQ = "zmq"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """What is published, and where. Fields and defaults are vLLM's, except ``buffer_bytes``.

    Args:
        enable_kv_cache_events: whether events are published at all.
        publisher: the kind of publisher; None means ``zmq`` if events are enabled.
        endpoint: address of the PUB socket; it is bound if it has a ``*``, ``::`` or is ipc or
            inproc.
        replay_endpoint: address of the ROUTER socket, always bound; None disables replay.
        buffer_steps: number of batches kept for replay.
        hwm: batches queued for a slow subscriber before it loses some.
        max_queue_size: batches queued for the publisher's thread before some are dropped, which
            subscribers see as a gap in sequence numbers.
        topic: content of the first frame.
        buffer_bytes: maximum memory of the batches kept for replay, in bytes. The batches of a
            store that restarts with a million chunks on its SSDs take a gigabyte.
    """

    enable_kv_cache_events: bool = False
    publisher: EventPublisherKind | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size", "buffer_bytes"):
            if getattr(self, name) < 1:
                raise KVConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def is_published(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher is not EventPublisherKind.NULL

    def of_dp_rank(self, dp_rank: int) -> KVEventsConfig:
        """The configuration of a data-parallel rank, with addresses of its own, numbered as in
        vLLM. An instance's own store counts as the rank after the last one."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_of_dp_rank(self.endpoint, dp_rank),
            replay_endpoint=None if replay is None else _of_dp_rank(replay, dp_rank),
        )

    def port_conflict(self, num_publishers: int) -> str | None:
        """The error message if two of ``num_publishers`` publishers would use the same port;
        otherwise None."""
        first, second = _port(self.endpoint), _port(self.replay_endpoint or "")
        if first is None or second is None or abs(int(first) - int(second)) >= num_publishers:
            return None
        return (
            f"--kv-events-config has endpoint at port {first} and replay_endpoint at {second}, and "
            f"each data-parallel rank and the store of --kv-pool take the next port of both: keep "
            f"them {num_publishers} apart"
        )


def read_kv_events_config(text: str) -> KVEventsConfig:
    """Parse ``--kv-events-config``, which is JSON with vLLM's field names.

    Raises:
        KVConfigError: the JSON is invalid; names the wrong field.
    """
    try:
        known = msgspec.json.decode(text, type=dict[str, object])
        unknown = known.keys() - {each.name for each in fields(KVEventsConfig)}
        if unknown:
            raise KVConfigError(f"--kv-events-config has no field {', '.join(sorted(unknown))}")
        return msgspec.convert(known, KVEventsConfig)
    except (msgspec.DecodeError, msgspec.ValidationError) as exc:
        wanted = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        raise KVConfigError(f"--kv-events-config wants JSON like {wanted}: {exc}") from exc


def _of_dp_rank(address: str, dp_rank: int) -> str:
    if not dp_rank:
        return address
    if address.startswith("tcp://"):
        port = _port(address)
        return address if port is None else f"{address[: -len(port)]}{int(port) + dp_rank}"
    return f"{address}_dp{dp_rank}"


def _port(address: str) -> str | None:
    """The port of a TCP address; None if it has none, or the system chooses it."""
    found = _NUMBERED.match(address)
    return None if found is None or found[2] == "0" else found[2]
