"""The messages between an executor and the processes of its ranks, encoded as msgpack."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from mooncake_engine.execution.executor import RankKVInfo
from mooncake_engine.execution.parallel_state import RankInfo
from mooncake_engine.messages import ExpertLoad, WaitedSeconds, pack_tokens, unpack_tokens
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.step_plan import StepPlan, StepResult
from mooncake_hal.backend import GroupSpec
from mooncake_hal.command_line import LogSettings


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank: load the weights; answered by Progress and then OrderDone.

    Args:
        plan: the instance's EnginePlan, pickled. Unpickling is safe: the executor started the
            process, or has authenticated itself to it by a key.
        info: the rank's number and place in its groups.
        stage, pipeline, experts: the groups of the rank that have more than one member; see
            ``ParallelGroups``.
        extension: name of the ExtensionFactory to load, or None.
        threads: number of CPU threads to compute with.
        log: format and level of the rank's log.
    """

    plan: bytes
    info: RankInfo
    stage: GroupSpec | None
    pipeline: GroupSpec | None
    experts: GroupSpec | None
    extension: str | None
    threads: int
    log: LogSettings = LogSettings()


class MakeKVCache(msgspec.Struct, frozen=True, tag=True):
    """All ranks have loaded their weights: measure the memory that they leave, which takes steps of
    all ranks together, and allocate the KV cache; answered by Ready."""


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Run the model once on made-up tokens; answered by OrderDone."""


class PackedPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A plan without the tokens and block tables of its new requests, which follow in packed form.
    What several choices of one prompt share is included once.

    Args:
        plan: the rest of the plan.
        shared: the tokens and block tables.
        indexes: for each new request, where its tokens and its block table are among ``shared``.
    """

    plan: StepPlan
    shared: tuple[bytes, ...] = ()
    indexes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, plan: StepPlan) -> PackedPlan:
        """Packs a plan."""
        if not plan.new_requests:
            return cls(plan)
        places: dict[int, int] = {}
        shared: list[bytes] = []

        def place(ids: tuple[int, ...]) -> int:
            if id(ids) not in places:  # the plan keeps all of them alive
                places[id(ids)] = len(shared)
                shared.append(pack_tokens(ids))
            return places[id(ids)]

        indexes = tuple((place(new.token_ids), place(new.block_ids)) for new in plan.new_requests)
        rest = tuple(replace(new, token_ids=(), block_ids=()) for new in plan.new_requests)
        return cls(replace(plan, new_requests=rest), tuple(shared), indexes)

    def unpack(self) -> StepPlan:
        """Returns the plan."""
        if not self.indexes:
            return self.plan
        shared = [unpack_tokens(packed) for packed in self.shared]
        new_requests = tuple(
            replace(new, token_ids=shared[tokens], block_ids=shared[table])
            for new, (tokens, table) in zip(self.plan.new_requests, self.indexes, strict=True)
        )
        return replace(self.plan, new_requests=new_requests)


class ExecuteModel(msgspec.Struct, frozen=True, tag=True):
    """Run a step; answered by OrderDone.

    Args:
        packed: the step.
        sampled: token ids by request that the last stage sampled in earlier steps: the other
            stages don't have them.
    """

    packed: PackedPlan
    sampled: dict[str, tuple[int, ...]] = {}


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar while steps run; answered by GrammarReady, not by OrderDone.

    Args:
        number: sequence number of the order, which GrammarReady repeats.
        grammar: the grammar to compile.
    """

    number: int
    grammar: Grammar


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close everything and exit; answered by the exit of the process."""


Order = Start | MakeKVCache | WarmUp | ExecuteModel | PrepareGrammar | Stop


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How many bytes of its weights rank 0 has loaded."""

    loaded_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded the model and can run steps."""

    info: RankKVInfo


class OrderDone(msgspec.Struct, frozen=True, tag=True):
    """The rank has completed an order.

    Args:
        result: the step's result, from the driver rank only.
        expert_load: totals so far, from the first rank of each stage, in some of its messages; see
            ``Worker.expert_load``.
        waited_s: totals so far, in some messages; see ``Worker.waited_s``.
    """

    result: StepResult | None = None
    expert_load: ExpertLoad | None = None
    waited_s: WaitedSeconds | None = None


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """The rank has failed and exits.

    Args:
        kind: class name of the error.
        reason: message of the error.
    """

    kind: str
    reason: str


Report = Progress | Ready | OrderDone | RankFailed


class Emitted(msgspec.Struct, frozen=True, tag=True):
    """A message from a rank's extension to the core."""

    message: bytes


class ExtensionFailed(msgspec.Struct, frozen=True, tag=True):
    """A thread of the rank's extension died.

    Args:
        reason: message of the error.
    """

    reason: str


class GrammarReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has compiled a grammar, or rejected it and will reject each request that uses it.

    Args:
        number: see ``PrepareGrammar``.
    """

    number: int


Notice = Emitted | ExtensionFailed | GrammarReady


encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
