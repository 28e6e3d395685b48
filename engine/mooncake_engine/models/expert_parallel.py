"""Expert parallelism: ranks hold whole experts, and tokens are dispatched to them and combined.

The tokens of a step are divided over the ranks of a stage. Attention's sum over ranks leaves each
token's row on a single rank (a reduce-scatter). The row is dispatched to the ranks that hold the
token's experts, the results come back, and only then all ranks gather all rows. So the ranks never
exchange more bytes than in tensor parallelism's two all-reduces, whatever the routing, and with
many ranks far fewer. Small steps, which are bound by latency, are not dispatched: every rank runs
all tokens through the experts that it holds.

Data-parallel ranks share experts too. Each rank brings its own tokens, or none; in small steps all
tokens go to every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from mooncake_engine.models.decoder import AttentionBlock, DecoderLayer
from mooncake_engine.models.expert_placement import plan_moves
from mooncake_engine.models.layers import Norm, ParallelContext, Span, share_of
from mooncake_engine.models.mlp import (
    DenseExperts,
    ExpertCounts,
    GatedMlp,
    MixtureOfExperts,
    MlpNames,
    Router,
    make_expert_weights,
)
from mooncake_engine.scheduling.step_plan import ExpertRound
from mooncake_hal.backend import Communicator, Exchange


class SharedTokens:
    """Divides the tokens of a step over the ranks of a group; the shares differ by at most one.

    Args:
        group: the ranks, each of which has all tokens; None for a single rank.
    """

    def __init__(self, group: Communicator | None) -> None:
        self._group = group

    def span(self, num_tokens: int) -> Span:
        """The tokens of this rank."""
        if self._group is None:
            return Span(0, num_tokens)
        return share_of(num_tokens, self._group.rank, self._group.world_size)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """Sum the partial sums of all ranks, [tokens, hidden], in float32; returns the rows of this
        rank."""
        if self._group is None:
            return partial
        counts = self.counts(len(partial))
        ranks = len(counts)
        own = counts[self._group.rank]
        parts = self._group.start_all_to_all(partial, counts, [own] * ranks).wait()
        parts = parts.view(ranks, own, partial.shape[1])
        return parts.sum(0, dtype=torch.float32).to(partial.dtype)

    def gather(self, own: Tensor, num_tokens: int) -> Tensor:
        """Gather the rows of all ranks, [tokens, hidden], on every rank."""
        if self._group is None:
            return own
        counts = self.counts(num_tokens)
        copies = own.repeat(len(counts), 1)
        return self._group.start_all_to_all(copies, [len(own)] * len(counts), counts).wait()

    def counts(self, num_tokens: int) -> list[int]:
        """The number of tokens of each rank."""
        ranks = 1 if self._group is None else self._group.world_size
        return [len(share_of(num_tokens, rank, ranks)) for rank in range(ranks)]


class ExpertReplicas:
    """Maps experts to their slots, the places that hold an expert on a rank. If an expert has
    several slots, its tokens use them in turn.

    Args:
        slots: the expert in each slot.
        num_experts: number of experts; each must have at least one slot.
        device: device of the ids.
    """

    def __init__(self, slots: Sequence[int], num_experts: int, device: torch.device) -> None:
        held: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(slots):
            held[expert].append(slot)
        most = max(len(slots) for slots in held)
        rows = [[slots[turn % len(slots)] for turn in range(most)] for slots in held]
        self._slots = torch.tensor(rows, device=device)
        self._counts = torch.tensor([len(slots) for slots in held], device=device)
        self._experts = torch.tensor(list(slots), device=device)

    def experts(self, slots: Tensor) -> Tensor:
        """Map slots to experts."""
        return self._experts[slots]

    def choose(self, ids: Tensor) -> Tensor:
        """Map experts to slots, [tokens, chosen]; the result is the same on all ranks that have the
        same tokens."""
        turns = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self._counts[ids]
        return self._slots[ids, turns]


class ExpertDispatch:
    """Dispatches tokens to the ranks that hold their experts, and combines the results.

    A row is sent once to each such rank, with its ids and weights (8 bytes per choice) and without
    padding. That rank returns one row, its part of the sum. No token is dropped.

    Args:
        group: all ranks of the stage, of all data-parallel ranks.
        owners: [slots] int64, the part of the group that holds each slot. A part is
            ``ranks / ep_size`` consecutive ranks, each with a slice of the part's experts.
        ep_size: number of parts.
    """

    def __init__(self, group: Communicator, owners: Tensor, ep_size: int) -> None:
        self._group = group
        self._owners = owners
        self._ep_size = ep_size

    def start(
        self,
        rows: Tensor,
        ids: Tensor,
        weights: Tensor,
        counts: ExpertCounts,
        chosen: Tensor,
        *,
        to_all_parts: bool = False,
    ) -> StartedDispatch:
        """Send this rank's rows to the ranks that hold their experts.

        Args:
            rows: the tokens' hidden states, [tokens, hidden].
            ids, weights: [tokens, chosen]; ids are of slots.
            counts: the layer's counts, to which tokens and sent rows are added.
            chosen: this rank's tokens by expert, [experts] int64, which ranks exchange.
            to_all_parts: send every row to every part, whatever it chose.
        """
        ranks = self._group.world_size
        is_wanted = torch.full((len(rows), self._ep_size), to_all_parts, device=ids.device)
        is_wanted.scatter_(1, self._owners[ids], True)
        is_wanted = is_wanted.repeat_interleave(ranks // self._ep_size, dim=1)
        exchanged = torch.cat([is_wanted.sum(0), chosen])
        by_sender = self._group.all_gather(exchanged.unsqueeze(0), dim=0)
        counts.add(by_sender[:, ranks:].sum(0))
        leaving = by_sender[:, :ranks].tolist()
        send = leaving[self._group.rank]
        recv = [of_sender[self._group.rank] for of_sender in leaving]
        counts.add_sent(sum(send) - send[self._group.rank])
        tokens = is_wanted.t().nonzero()[:, 1]  # in the order of receiving ranks
        packed = _packed(rows[tokens], ids[tokens], weights[tokens])
        exchange = self._group.start_all_to_all(packed, send, recv)
        return StartedDispatch(self._group, exchange, rows, tokens, (send, recv), ids.shape[1])

    def start_to_all(
        self, rows: Tensor, ids: Tensor, weights: Tensor, recv: list[int]
    ) -> StartedDispatch:
        """Send this rank's rows to every rank, with one collective less than ``start``.

        Args:
            rows, ids, weights: see ``start``.
            recv: number of rows that each rank sends.
        """
        send = [len(rows)] * len(recv)
        packed = _packed(rows, ids, weights).repeat(len(recv), 1)
        exchange = self._group.start_all_to_all(packed, send, recv)
        tokens = torch.arange(len(rows), device=rows.device).repeat(len(recv))
        return StartedDispatch(self._group, exchange, rows, tokens, (send, recv), ids.shape[1])


class StartedDispatch:
    """A dispatch in flight.

    Args:
        group: the ranks that take part.
        exchange: the collective in flight.
        rows: this rank's rows, [tokens, hidden].
        tokens: the token of each row that this rank sends.
        counts: rows sent to each rank, and received from each.
        chosen: number of choices per token.
    """

    def __init__(
        self,
        group: Communicator,
        exchange: Exchange,
        rows: Tensor,
        tokens: Tensor,
        counts: tuple[list[int], list[int]],
        chosen: int,
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._rows = rows
        self._tokens = tokens
        self._counts = counts
        self._chosen = chosen

    def arrived(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the rows that this rank receives: [rows, hidden], with the ids and weights of
        all their choices, [rows, chosen]."""
        width, chosen = self._rows.shape[1] * self._rows.element_size(), self._chosen
        widths = [width, 4 * chosen, 4 * chosen]
        row, ids, weights = torch.split(self._exchange.wait(), widths, dim=1)
        return (
            row.contiguous().view(self._rows.dtype),
            ids.contiguous().view(torch.int32).long(),
            weights.contiguous().view(torch.float32),
        )

    def combine(self, outputs: Tensor) -> Tensor:
        """Send back the outputs of the received rows; returns the sums of this rank's tokens,
        [tokens, hidden], made in float32."""
        send, recv = self._counts
        returned = self._group.start_all_to_all(outputs, recv, send).wait()
        total = torch.zeros_like(self._rows, dtype=torch.float32)
        return total.index_add_(0, self._tokens, returned.float()).to(self._rows.dtype)


def _packed(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Pack rows into [rows, bytes] uint8: hidden states, ids as int32, weights as float32."""
    parts = (rows, ids.to(torch.int32), weights.to(torch.float32))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


class ExpertParallelMixture(MixtureOfExperts):
    """A mixture of experts with expert parallelism: each rank holds some of the routed experts.
    Every rank holds the whole shared experts, and applies them to its share of the tokens.

    Args:
        parallel: the parallel context of the rank, with an ``ep_size`` above 1.
        router: chooses routed experts.
        names: names of every expert's linears, with all numbers filled in.
        slots: the expert in each slot of the layer.
        shape: hidden and inner size of an expert.
        shared: names and inner size of the shared experts; None if the model has none.

    Attributes:
        counts: the tokens of the layer's experts.
        tokens: divides a step's tokens over ranks.
    """

    def __init__(
        self,
        parallel: ParallelContext,
        router: Router,
        names: list[MlpNames],
        slots: Sequence[int],
        shape: tuple[int, int],
        *,
        shared: tuple[MlpNames, int] | None,
    ) -> None:
        group = parallel.expert_communicator or parallel.communicator
        assert group is not None, "experts are divided over several ranks"
        self._group = group
        self._hidden_size = shape[0]
        self._parallel = parallel
        self._held = parallel.expert_share(len(slots))
        held = slots[self._held.start : self._held.stop]
        experts = make_expert_weights(parallel, names, held, shape)
        whole = replace(parallel, communicator=None, expert_communicator=None, ep_size=1)
        of_all = GatedMlp(whole, shared[0], (shape[0], shared[1])) if shared is not None else None
        super().__init__(parallel, router, experts, of_all)
        self._num_experts = len(names)
        self._replicas = ExpertReplicas(slots, len(names), parallel.device)
        self.counts = ExpertCounts(len(names), slots, parallel.device)
        self.tokens = SharedTokens(parallel.communicator)
        parts = [share_of(len(slots), part, parallel.ep_size) for part in range(parallel.ep_size)]
        owners = [part for part, span in enumerate(parts) for _ in range(len(span))]
        self._dispatch = ExpertDispatch(
            group, torch.tensor(owners, device=parallel.device), parallel.ep_size
        )
        self._is_worst_routed = False

    @contextmanager
    def worst_routing(self) -> Iterator[None]:
        """While the context is entered, every rank gets all tokens, with as many choices as it has
        slots for; see ``Model``."""
        self._is_worst_routed = True
        try:
            yield
        finally:
            self._is_worst_routed = False
            self.counts.reset()

    def __call__(self, x: Tensor) -> Tensor:
        """Run a small step: map [tokens, hidden], the same on every rank, to [tokens, hidden].
        Every rank runs the experts that it holds, and one all-reduce adds up their outputs."""
        ids, weights = self._router(x)
        self.counts.add(self.counts.of(ids))
        partial = self._run_held(x, self._replicas.choose(ids), weights)
        if self._shared is not None:
            own = self.tokens.span(len(x))
            partial[own.start : own.stop] += self._shared(x[own.start : own.stop])
        return self._group.all_reduce(partial)

    def run_shared_tokens(self, own: Tensor, expert_round: ExpertRound) -> Tensor:
        """Run this rank's tokens, [tokens, hidden], through the experts of all ranks. A collective:
        every rank calls it, even without tokens."""
        ids, weights = self._router(own)
        slots = self._replicas.choose(ids)
        shares = (max(self.tokens.counts(count)) for count in expert_round.token_counts)
        most, fused = max(shares), self._parallel.fused_experts
        is_fitting = most <= self._parallel.fused_max_tokens and not self._is_worst_routed
        if fused is not None and is_fitting and isinstance(self._experts, DenseExperts):
            self.counts.add(self._group.all_reduce(self.counts.of(ids)))
            foreign = (slots < self._held.start) | (slots >= self._held.stop)
            self.counts.add_sent(foreign.sum())
            combined = self._experts.run_fused(fused, own, slots, weights, most)
            return combined if self._shared is None else combined + self._shared(own)
        to_all = None if expert_round.is_dispatched else expert_round
        if to_all is None:
            chosen = self.counts.of(ids)
            started = self._dispatch.start(
                own, slots, weights, self.counts, chosen, to_all_parts=self._is_worst_routed
            )
        else:
            counts = map(self.tokens.counts, to_all.token_counts)
            recv = [count for of_ranks in counts for count in of_ranks]
            self.counts.add_sent(len(own) * (len(recv) - 1))
            started = self._dispatch.start_to_all(own, slots, weights, recv)
        shared = None if self._shared is None else self._shared(own)  # overlaps the dispatch
        rows, slots, weights = started.arrived()
        if to_all is not None:
            self.counts.add(self.counts.of(self._replicas.experts(slots)))
        combined = started.combine(self._run_held(rows, slots, weights))
        return combined if shared is None else combined + shared

    def move_experts(self, slots: Sequence[int]) -> None:
        """Change the expert in each slot, and send the weights between ranks. A collective: every
        rank calls it with the same slots, between the same two forward passes."""
        parts = self._parallel.ep_size
        moves = plan_moves(self.counts.slots, slots, parts)
        sharers = self._group.world_size // parts
        part, slice_ = divmod(self._group.rank, sharers)
        size = len(self._held)
        leaving: list[int] = []  # indexes of held experts, in the order of receiving ranks
        send, recv = [0] * self._group.world_size, [0] * self._group.world_size
        for move in moves:
            if move.source // size == part:
                leaving.append(move.source - self._held.start)
                send[move.target // size * sharers + slice_] += 1
        arriving = sorted(
            (move for move in moves if move.target // size == part),
            key=lambda move: move.source // size,
        )
        for move in arriving:
            recv[move.source // size * sharers + slice_] += 1
        targets = [move.target - self._held.start for move in arriving]

        def moved(weights: Tensor) -> tuple[list[int], Tensor]:
            return targets, self._group.start_all_to_all(weights[leaving], send, recv).wait()

        self._experts.exchange(moved)
        self._replicas = ExpertReplicas(slots, self._num_experts, self._parallel.device)
        self.counts.record_placement(slots, sum(recv) - recv[self._group.rank])

    def serve(self, expert_round: ExpertRound) -> None:
        """Take part in ``run_shared_tokens`` of other ranks, without tokens of this one."""
        self.run_shared_tokens(self._parallel.empty(0, self._hidden_size), expert_round)

    def _run_held(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """This rank's part of the weighted sum, [tokens, hidden]: that of the experts it holds."""
        chosen = ids.shape[1]
        local = (ids - self._held.start).flatten()
        if self._is_worst_routed:  # the choices of a token must be different slots
            local = torch.arange(chosen, device=ids.device).repeat(len(x))
        here = ((local >= 0) & (local < len(self._held))).nonzero().squeeze(1)
        outputs = x.new_zeros(len(x) * chosen, x.shape[1])
        if len(here):
            pairs = local[here].unsqueeze(1), weights.flatten()[here].unsqueeze(1)
            outputs[here] = self._experts(x[here // chosen], *pairs)
        return outputs.view(len(x), chosen, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


class ExpertParallelLayer(DecoderLayer):
    """A layer with expert parallelism: larger steps divide their tokens over the ranks after
    attention.

    Args:
        norms, attention: see ``DecoderLayer``.
        mixture: the layer's experts.
        min_tokens: the fewest tokens of a step that are divided over ranks.
    """

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        attention: AttentionBlock,
        mixture: ExpertParallelMixture,
        min_tokens: int,
    ) -> None:
        super().__init__(norms, attention, mixture)
        self._mixture = mixture
        self._min_tokens = min_tokens

    def finish(
        self, attended: Tensor, residual: Tensor, expert_round: ExpertRound | None = None
    ) -> tuple[Tensor, Tensor]:
        num_tokens = len(residual)
        if expert_round is None and num_tokens < self._min_tokens:
            return super().finish(attended, residual)
        tokens = self._mixture.tokens
        own, span = tokens.reduce_scatter(self.attention.partial(attended)), tokens.span(num_tokens)
        x, own_residual = self.mlp_norm.add(own, residual[span.start : span.stop])
        alone = ExpertRound((num_tokens,), is_dispatched=True)
        output = self._mixture.run_shared_tokens(x, expert_round or alone)
        total = tokens.gather(output + own_residual, num_tokens)
        return torch.zeros_like(total), total
