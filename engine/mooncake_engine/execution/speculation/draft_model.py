"""Draft tokens of a smaller model with the same vocabulary (Leviathan et al. 2023).

They stay on the device, whose host launches all passes one behind the other: it learns them with
what became of them. Only where a choice depends on the tokens before it, as within a grammar, does
the host wait for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from mooncake_engine.execution.input_batch import ForwardInputs, ScheduledTokens, lay_out
from mooncake_engine.execution.request_table import BlockTables, CachedRequest, SamplingState
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler
from mooncake_engine.execution.speculation.draft_kv import DraftKV, TokenRange
from mooncake_engine.execution.speculation.drafts import (
    NO_DRAFTS,
    Draft,
    DraftRequest,
    StepDrafts,
    advance,
    depends_on_tokens,
)
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend_parts import index_tensor

_FEW = 8
"""Up to this many tokens of a sequence attend one by one, which is faster than as a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A loaded draft model of one rank.

    Args:
        model: with the vocabulary of the model that it drafts for.
        pool: its KV, with as many blocks as the model's, of as many tokens.
        max_tokens: most tokens of one pass.
        max_positions: length of the longest sequence that it takes.
    """

    model: Model
    pool: KVPool
    max_tokens: int
    max_positions: int

    def run(self, inputs: ForwardInputs, rows: Sequence[int] | None = None) -> Tensor:
        """Logits behind some of the tokens, or all of them: [rows, vocab] float32."""
        kv = {index: self.pool.layer(index) for index in range(self.pool.shard.layers)}
        context = ForwardContext(inputs.attention, kv)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, context)
        if rows is None:
            return self.model.logits(hidden)
        if not rows:
            return hidden[:0]
        return self.model.logits(hidden[index_tensor(hidden.device, rows)])


@dataclass(slots=True, eq=False)
class _Branch:
    """A request and the draft tokens for it so far.

    Args:
        state: of the request.
        num_wanted: how many draft tokens.
        states, token_ids, distributions: see ``Draft``.
        places: where its draft tokens are among all that the step has made.
    """

    state: CachedRequest
    num_wanted: int
    states: list[SamplingState]
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Tensor | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    is_open: bool = True

    def add(self, token_id: int | None, distribution: Tensor | None, place: int) -> None:
        """Take a draft token in, unless there is none or the request's grammar forbids it.

        Args:
            token_id: None where only the device knows it.
            distribution, place: its own.
        """
        following = None
        if token_id != NO_TOKEN:
            token_id = NO_TOKEN if token_id is None else token_id
            following = advance(self.states[-1], token_id)
        if following is not None:
            self.states.append(following)
            self.token_ids.append(token_id)
            self.distributions.append(distribution)
            self.places.append(place)
        self.is_open = following is not None and len(self.token_ids) < self.num_wanted


class DraftModelProposer:
    """Runs a draft model behind the last tokens of requests.

    It first catches up with what it has not run of them, within ``max_tokens`` per step: a request
    that is not done with that gets no draft tokens in this step.

    Args:
        draft: the model.
        tables: block tables of the requests, the model's own.
        sampler: chooses draft tokens, as it chooses tokens.
    """

    def __init__(self, draft: DraftModel, tables: BlockTables, sampler: Sampler) -> None:
        self._draft = draft
        self._tables = tables
        self._sampler = sampler
        self._books = DraftKV(draft.pool.block_size)

    def propose(self, wanted: Sequence[DraftRequest]) -> StepDrafts:
        branches = [_Branch(state, count, [state]) for state, count in self._possible(wanted)]
        unfinished, logits = self._catch_up(branches)
        drafted: list[Tensor] = []
        num_drafted = 0
        while unfinished:
            found = self._sampler.draft(logits, [branch.states[-1] for branch in unfinished])
            drafted.append(found.token_ids)
            known = _on_host(found.token_ids, unfinished)
            for row, branch in enumerate(unfinished):
                branch.add(known[row], found.distributions.get(row), num_drafted + row)
            num_drafted += len(unfinished)
            is_open = [branch.is_open for branch in unfinished]
            unfinished = [branch for branch in unfinished if branch.is_open]
            if unfinished:
                logits = self._run_drafts(unfinished, _kept(found.token_ids, is_open))
        return _collect([branch for branch in branches if branch.token_ids], drafted)

    def forget(self, request_ids: Iterable[str]) -> None:
        self._books.forget(request_ids)

    def close(self) -> None:
        self._draft.pool.close()

    def _possible(self, wanted: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Draft tokens whose positions the draft model knows; the last one's is not run."""
        limit = self._draft.max_positions
        capped = [
            DraftRequest(state, min(count, limit - len(state.token_ids) + 1))
            for state, count in wanted
        ]
        return [request for request in capped if request.num_tokens > 0]

    def _catch_up(self, branches: Sequence[_Branch]) -> tuple[list[_Branch], Tensor]:
        """Run what is missing; those that are up to date then, and logits behind each."""
        budget = self._draft.max_tokens
        claims = []
        for branch in branches:
            state = branch.state
            blocks = partial(self._tables.block_ids, state.row)
            claim = self._books.claim(
                state.request_id, state.token_ids, blocks, budget, state.cache_salt
            )
            budget -= claim.stop - claim.start
            if claim.start < claim.stop:
                claims.append((branch, claim))
        if not claims:
            return [], torch.empty(0)
        # single tokens first, as in every batch
        claims.sort(key=lambda pair: pair[1].stop - pair[1].start > _FEW)
        return self._run_claims(claims)

    def _run_claims(
        self, claims: Sequence[tuple[_Branch, TokenRange]]
    ) -> tuple[list[_Branch], Tensor]:
        shares, tokens = ScheduledTokens([], [], []), []
        done, last_rows = [], []
        for branch, (start, stop) in claims:
            if stop - start <= _FEW:
                shares.add_single_tokens(branch.state.row, start, stop - start)
            else:
                shares.add(branch.state.row, start, stop - start)
            tokens += branch.state.token_ids[start:stop]
            if stop == len(branch.state.token_ids):
                done.append(branch)
                last_rows.append(len(tokens) - 1)
        return done, self._draft.run(self._lay_out(shares, tokens), last_rows)

    def _run_drafts(self, branches: Sequence[_Branch], newest: Tensor) -> Tensor:
        """Run each branch's last draft token, [branches] int64 on the device; logits behind it."""
        for branch in branches:
            self._books.add_draft(branch.state.request_id, branch.token_ids)
        shares = ScheduledTokens(
            [branch.state.row for branch in branches],
            [len(branch.state.token_ids) + len(branch.token_ids) - 1 for branch in branches],
            [1] * len(branches),
        )
        inputs = self._lay_out(shares, [0] * len(branches))
        return self._draft.run(replace(inputs, token_ids=newest.clamp(min=0)))

    def _lay_out(self, shares: ScheduledTokens, token_ids: Sequence[int]) -> ForwardInputs:
        pool = self._draft.pool
        return lay_out(shares, token_ids, self._tables, pool.block_size, pool.device)


def _on_host(token_ids: Tensor, branches: Sequence[_Branch]) -> Sequence[int | None]:
    """What was drafted, as far as the host has to know it now: the device is waited for."""
    if any(depends_on_tokens(branch.state) for branch in branches):
        known: list[int | None] = token_ids.tolist()
        return known
    return [None] * len(branches)


def _kept(token_ids: Tensor, is_kept: Sequence[bool]) -> Tensor:
    """Those of some rows, on the device."""
    if all(is_kept):
        return token_ids
    rows = [row for row, kept in enumerate(is_kept) if kept]
    return token_ids[index_tensor(token_ids.device, rows)]


def _collect(branches: Sequence[_Branch], drafted: Sequence[Tensor]) -> StepDrafts:
    """The step's, in the order of its requests."""
    if not branches:
        return NO_DRAFTS
    places = [place for branch in branches for place in branch.places]
    on_device = torch.cat(list(drafted))
    if places != list(range(len(on_device))):
        on_device = on_device[index_tensor(on_device.device, places)]
    by_request = {
        branch.state.request_id: Draft(branch.states, branch.token_ids, branch.distributions)
        for branch in branches
    }
    return StepDrafts(by_request, on_device)
