"""What an instance publishes as KV events, and where: vLLM's ``--kv-events-config``.

Apart from the publisher, as a command line is read without ZeroMQ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from enum import Enum

import msgspec

from mooncake_kv.errors import KVConfigError

_NUMBERED = re.compile(r"(tcp://.*:)(\d+)$")


class EventPublisherKind(str, Enum):
    """Where events go."""

    NULL = "null"
    ZMQ = "zmq"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """What is published, and where; fields and defaults are vLLM's, but for ``buffer_bytes``.

    Args:
        enable_kv_cache_events: whether there are events at all.
        publisher: where they go; None means ``zmq`` if they are enabled.
        endpoint: of the PUB socket; it is bound if it has a ``*``, ``::`` or is ipc or inproc.
        replay_endpoint: of the ROUTER socket, always bound; None for no replay.
        buffer_steps: batches that are kept for a replay.
        hwm: batches that wait for a slow subscriber before it loses some.
        max_queue_size: batches that wait for the publisher's thread before some are dropped, which
            subscribers see as a gap.
        topic: of the first frame.
        buffer_bytes: what the batches that are kept for a replay take in memory at most: those of a
            store that restarts with a million chunks on its SSDs are a gigabyte.
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
        """Whether anything is sent."""
        return self.enable_kv_cache_events and self.publisher is not EventPublisherKind.NULL

    def of_dp_rank(self, dp_rank: int) -> KVEventsConfig:
        """The same for a data-parallel rank, with addresses of its own, as vLLM numbers them; the
        store in an instance comes behind the last rank."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_of_dp_rank(self.endpoint, dp_rank),
            replay_endpoint=None if replay is None else _of_dp_rank(replay, dp_rank),
        )

    def why_crowded(self, num_publishers: int) -> str | None:
        """What is wrong with ports that two of so many would take; None if none are."""
        first, second = _port(self.endpoint), _port(self.replay_endpoint or "")
        if first is None or second is None or abs(int(first) - int(second)) >= num_publishers:
            return None
        return (
            f"--kv-events-config has endpoint at port {first} and replay_endpoint at {second}, and "
            f"each data-parallel rank and the store of --kv-pool take the next port of both: keep "
            f"them {num_publishers} apart"
        )


def read_kv_events_config(text: str) -> KVEventsConfig:
    """``--kv-events-config``: JSON with vLLM's field names.

    Raises:
        KVConfigError: it is no such JSON; says which field is wrong.
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
    """Of a TCP address; None if the system chooses it, or there is none."""
    found = _NUMBERED.match(address)
    return None if found is None or found[2] == "0" else found[2]
