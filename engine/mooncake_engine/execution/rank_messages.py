"""What an executor and the processes of its ranks say to each other: msgpack, never pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.config import EngineConfig
from mooncake_engine.execution.executor import RankFacts
from mooncake_engine.execution.rank_place import RankPlace
from mooncake_engine.scheduling.plan import StepPlan, StepResult
from mooncake_hal.backend import GroupSpec


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: load the model.

    Args:
        config: the instance's.
        backend: name of the backend to load; decided by the parent, never ``auto``.
        place: where the rank stands.
        stage, pipeline: its groups; see ``RankGroups``.
        extension: name of its ExtensionFactory, if any.
        threads: CPU threads to compute with.
    """

    config: EngineConfig
    backend: str
    place: RankPlace
    stage: GroupSpec
    pipeline: GroupSpec
    extension: str | None
    threads: int


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Run the model once on made-up tokens; answered by Done."""


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Run a step; answered by Done.

    Args:
        plan: the step.
        sampled: token ids by request, of earlier steps, that stages before the last don't know.
    """

    plan: StepPlan
    sampled: dict[str, tuple[int, ...]] = {}


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close everything and exit; answered by the process's end."""


Order = Start | WarmUp | Execute | Stop


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's weights so far, in bytes."""

    loaded_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank is loaded."""

    facts: RankFacts


class Done(msgspec.Struct, frozen=True, tag=True):
    """An order is carried out; the rank that speaks for the instance adds what came of a step."""

    result: StepResult | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank can't go on, and exits.

    Args:
        kind: class name of the error.
        reason: its message.
    """

    kind: str
    reason: str


Report = Progress | Ready | Done | Failed


class Emitted(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank's extension to the core."""

    message: bytes


class ExtensionFailed(msgspec.Struct, frozen=True, tag=True):
    """A thread of the rank's extension died of this."""

    reason: str


Notice = Emitted | ExtensionFailed


def _encode_path(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def _decode_path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} has no wire form")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_path).encode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=_decode_path).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
