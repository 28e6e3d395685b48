"""What an executor and the processes of its ranks say to each other, as msgpack."""

from __future__ import annotations

import msgspec

from mooncake_engine.execution.executor import RankKVInfo
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.messages import ExpertLoad, WaitedSeconds
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult
from mooncake_hal.backend import GroupSpec
from mooncake_hal.command_line import LogSettings


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to a rank: load the model.

    Args:
        plan: the instance's EnginePlan, as a pickle: the executor made the process, or proved
            itself to it by a key.
        info: which rank it is.
        stage, pipeline, experts: its groups, those of more than one rank; see ``ParallelGroups``.
        extension: name of its ExtensionFactory, if any.
        threads: CPU threads to compute with.
        log: how its log looks.
    """

    plan: bytes
    info: RankInfo
    stage: GroupSpec | None
    pipeline: GroupSpec | None
    experts: GroupSpec | None
    extension: str | None
    threads: int
    log: LogSettings = LogSettings()


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Run the model once on made-up tokens; answered by OrderDone."""


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Run a step; answered by OrderDone.

    Args:
        plan: the step.
        sampled: token ids by request, of earlier steps, that stages before the last don't know.
    """

    plan: StepPlan
    sampled: dict[str, tuple[int, ...]] = {}


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar beside steps; answered by GrammarReady, and not by OrderDone.

    Args:
        number: of this order among those of its kind.
        grammar: which.
    """

    number: int
    grammar: Grammar


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close everything and exit; answered by the process's end."""


Order = Start | WarmUp | Execute | PrepareGrammar | Stop


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's weights so far, in bytes."""

    loaded_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank is loaded."""

    info: RankKVInfo


class OrderDone(msgspec.Struct, frozen=True, tag=True):
    """An order is carried out; the driver rank adds the step's result.

    Args:
        result: of the step.
        expert_load: so far, now and then, of the first rank of each stage; see
            ``Worker.expert_load``.
        waited_s: so far, now and then; see ``Worker.waited_s``.
    """

    result: StepResult | None = None
    expert_load: ExpertLoad | None = None
    waited_s: WaitedSeconds | None = None


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank has failed, and exits.

    Args:
        kind: class name of the error.
        reason: its message.
    """

    kind: str
    reason: str


Report = Progress | Ready | OrderDone | RankFailed


class Emitted(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank's extension to the core."""

    message: bytes


class ExtensionFailed(msgspec.Struct, frozen=True, tag=True):
    """A thread of the rank's extension died of this."""

    reason: str


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """A grammar is compiled, or refused: then each request with it will be."""

    number: int


Notice = Emitted | ExtensionFailed | GrammarReady


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
