"""Expert parallelism: experts whole on ranks, tokens dispatched to them and combined again.

A step's tokens are shared out over the ranks of a stage: attention's sum over ranks leaves each
token's row on one rank alone (a reduce-scatter), the token goes to the ranks that have experts of
its choice and comes back, and only then all ranks get all rows again. So no more bytes cross than
in tensor parallelism's two all-reduces, however tokens choose, and with many ranks far fewer.
Small steps, whose time is latency, stay on every rank, which runs the experts that it has.

Data-parallel ranks share experts, too. Each runs tokens of its own, or none at all; those of small
steps go to every rank.
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
    """A step's tokens, shared out over the ranks of a group: sizes differ by at most one.

    Args:
        group: has all of them; None for a rank alone.
    """

    def __init__(self, group: Communicator | None) -> None:
        self._group = group

    def span(self, num_tokens: int) -> Span:
        """Those of this rank."""
        if self._group is None:
            return Span(0, num_tokens)
        return share_of(num_tokens, self._group.rank, self._group.world_size)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """[tokens, hidden], a part of the sum over ranks, to the sum's rows of this rank; the sum
        is made in float32."""
        if self._group is None:
            return partial
        counts = self.counts(len(partial))
        ranks = len(counts)
        own = counts[self._group.rank]
        parts = self._group.start_all_to_all(partial, counts, [own] * ranks).wait()
        parts = parts.view(ranks, own, partial.shape[1])
        return parts.sum(0, dtype=torch.float32).to(partial.dtype)

    def gather(self, own: Tensor, num_tokens: int) -> Tensor:
        """Every rank's rows on every rank, [tokens, hidden]."""
        if self._group is None:
            return own
        counts = self.counts(num_tokens)
        copies = own.repeat(len(counts), 1)
        return self._group.start_all_to_all(copies, [len(own)] * len(counts), counts).wait()

    def counts(self, num_tokens: int) -> list[int]:
        """How many each rank has."""
        ranks = 1 if self._group is None else self._group.world_size
        return [len(share_of(num_tokens, rank, ranks)) for rank in range(ranks)]


class ExpertReplicas:
    """The slots of a layer: places for an expert on a rank. Where an expert has several, the tokens
    that choose it take turns.

    Args:
        slots: the expert in each.
        num_experts: each has a slot at least.
        device: where ids are.
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
        """From slots to experts."""
        return self._experts[slots]

    def choose(self, ids: Tensor) -> Tensor:
        """From experts to slots, [tokens, chosen]; the same on ranks with the same tokens."""
        turns = torch.arange(len(ids), device=ids.device).unsqueeze(1) % self._counts[ids]
        return self._slots[ids, turns]


class ExpertDispatch:
    """The way of tokens to the ranks that have experts of their choice, and back.

    A row leaves once for each such rank, with its ids and weights (8 bytes per choice) and no
    padding; what comes back is one row, of that rank's part of the sum. No token is dropped.

    Args:
        group: all ranks of the stage, of all data-parallel ranks.
        owners: [slots] int64, which part of the group has each; a part is ``ranks / ep_size``
            neighbouring ranks, each with a slice of the part's experts.
        ep_size: parts.
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
        """Send this rank's rows [tokens, hidden] to whoever has experts of their choice.

        Args:
            rows: of tokens, [tokens, hidden].
            ids, weights: [tokens, chosen]; ids are of slots.
            counts: what is counted in.
            chosen: this rank's tokens by expert, [experts] int64; ranks tell each other.
            to_all_parts: send every row to everybody, whatever it chose.
        """
        ranks = self._group.world_size
        is_wanted = torch.full((len(rows), self._ep_size), to_all_parts, device=ids.device)
        is_wanted.scatter_(1, self._owners[ids], True)
        is_wanted = is_wanted.repeat_interleave(ranks // self._ep_size, dim=1)
        told = torch.cat([is_wanted.sum(0), chosen])
        by_sender = self._group.all_gather(told.unsqueeze(0), dim=0)
        counts.add(by_sender[:, ranks:].sum(0))
        leaving = by_sender[:, :ranks].tolist()
        send = leaving[self._group.rank]
        recv = [of_sender[self._group.rank] for of_sender in leaving]
        counts.add_sent(sum(send) - send[self._group.rank])
        tokens = is_wanted.t().nonzero()[:, 1]  # in the order of ranks
        packed = _packed(rows[tokens], ids[tokens], weights[tokens])
        exchange = self._group.start_all_to_all(packed, send, recv)
        return StartedDispatch(self._group, exchange, rows, tokens, (send, recv), ids.shape[1])

    def start_to_all(
        self, rows: Tensor, ids: Tensor, weights: Tensor, recv: list[int]
    ) -> StartedDispatch:
        """Send this rank's rows [tokens, hidden] to every rank, one collective less than ``start``.

        Args:
            rows, ids, weights: as of ``start``.
            recv: rows that each rank has.
        """
        send = [len(rows)] * len(recv)
        packed = _packed(rows, ids, weights).repeat(len(recv), 1)
        exchange = self._group.start_all_to_all(packed, send, recv)
        tokens = torch.arange(len(rows), device=rows.device).repeat(len(recv))
        return StartedDispatch(self._group, exchange, rows, tokens, (send, recv), ids.shape[1])


class StartedDispatch:
    """Rows under way to experts."""

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
        """Rows that came to this rank, [rows, hidden], with the ids and weights of all their
        choices, [rows, chosen]."""
        width, chosen = self._rows.shape[1] * self._rows.element_size(), self._chosen
        widths = [width, 4 * chosen, 4 * chosen]
        row, ids, weights = torch.split(self._exchange.wait(), widths, dim=1)
        return (
            row.contiguous().view(self._rows.dtype),
            ids.contiguous().view(torch.int32).long(),
            weights.contiguous().view(torch.float32),
        )

    def combine(self, outputs: Tensor) -> Tensor:
        """Send back what came of the rows that arrived; returns this rank's tokens' sums, made in
        float32, [tokens, hidden]."""
        send, recv = self._counts
        returned = self._group.start_all_to_all(outputs, recv, send).wait()
        total = torch.zeros_like(self._rows, dtype=torch.float32)
        return total.index_add_(0, self._tokens, returned.float()).to(self._rows.dtype)


def _packed(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[rows, bytes] uint8: a row of hidden states, its ids as int32, its weights as float32."""
    parts = (rows, ids.to(torch.int32), weights.to(torch.float32))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


class ExpertParallelMixture(MixtureOfExperts):
    """Routed experts of which each rank has some, beside them those that every token takes, which
    every rank has whole and applies to its share of the tokens.

    Args:
        parallel: where it lives; ``ep_size`` is above 1.
        router: chooses.
        names: of every expert's linears, complete.
        slots: the expert in each slot of the layer.
        shape: hidden and inner size of an expert.
        shared: names and inner size of what takes every token, if the model has such.
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
        """Meanwhile every rank gets all tokens, with as many choices as it has slots for."""
        self._is_worst_routed = True
        try:
            yield
        finally:
            self._is_worst_routed = False
            self.counts.forget()

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden], the same on every rank, to [tokens, hidden]: every rank runs the
        experts that it has, and one sum over ranks is all that crosses."""
        ids, weights = self._router(x)
        self.counts.add(self.counts.of(ids))
        partial = self._run_held(x, self._replicas.choose(ids), weights)
        if self._shared is not None:
            own = self.tokens.span(len(x))
            partial[own.start : own.stop] += self._shared(x[own.start : own.stop])
        return self._group.all_reduce(partial)

    def run_shared_tokens(self, own: Tensor, expert_round: ExpertRound) -> Tensor:
        """This rank's tokens, [tokens, hidden], through experts of all ranks; every rank calls it,
        with tokens or without."""
        ids, weights = self._router(own)
        slots = self._replicas.choose(ids)
        shares = (max(self.tokens.counts(count)) for count in expert_round.token_counts)
        most, fused = max(shares), self._parallel.fused_experts
        is_fitting = most <= self._parallel.fused_most_tokens and not self._is_worst_routed
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
        shared = None if self._shared is None else self._shared(own)  # while rows are under way
        rows, slots, weights = started.arrived()
        if to_all is not None:
            self.counts.add(self.counts.of(self._replicas.experts(slots)))
        combined = started.combine(self._run_held(rows, slots, weights))
        return combined if shared is None else combined + shared

    def move_experts(self, slots: Sequence[int]) -> None:
        """Give experts other slots; their weights go from rank to rank. Every rank calls it, with
        the same slots, between two forward passes."""
        parts = self._parallel.ep_size
        moves = plan_moves(self.counts.slots, slots, parts)
        sharers = self._group.world_size // parts
        part, slice_ = divmod(self._group.rank, sharers)
        size = len(self._held)
        leaving: list[int] = []  # held experts, in the order of the ranks that they go to
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
        self.counts.note_placement(slots, sum(recv) - recv[self._group.rank])

    def serve(self, expert_round: ExpertRound) -> None:
        """Run experts for other ranks' tokens, with none of this one's."""
        self.run_shared_tokens(self._parallel.empty(0, self._hidden_size), expert_round)

    def _run_held(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The part of the weighted sum that this rank's experts make, [tokens, hidden]."""
        chosen = ids.shape[1]
        local = (ids - self._held.start).flatten()
        if self._is_worst_routed:  # a token's choices differ, and so do their slots
            local = torch.arange(chosen, device=ids.device).repeat(len(x))
        here = ((local >= 0) & (local < len(self._held))).nonzero().squeeze(1)
        outputs = x.new_zeros(len(x) * chosen, x.shape[1])
        if len(here):
            pairs = local[here].unsqueeze(1), weights.flatten()[here].unsqueeze(1)
            outputs[here] = self._experts(x[here // chosen], *pairs)
        return outputs.view(len(x), chosen, x.shape[1]).sum(1, dtype=torch.float32).to(x.dtype)


class ExpertParallelLayer(DecoderLayer):
    """A layer whose larger steps share their tokens out over ranks between attention and the end.

    Args:
        norms, attention: see ``DecoderLayer``.
        mixture: its experts.
        min_tokens: of steps that are shared out.
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
