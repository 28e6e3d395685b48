"""Draft tokens from a smaller model with the same vocabulary (Leviathan et al. 2023).

The draft tokens stay on the device, so that the host can launch all draft passes without waiting;
it reads them together with the result of their verification. Only if a choice depends on the tokens
before it, as with a grammar, does the host wait for each token.
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
from mooncake_engine.kv_cache.kv_cache_memory import KVCacheMemory
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.parallel_context import ForwardContext
from mooncake_hal.backend_parts import index_tensor

_MAX_SINGLE_TOKENS = 8
"""Up to this many tokens of a sequence run as single tokens, whose attention kernels are faster for
them than those for prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """The loaded draft model of one rank.

    Args:
        model: a model with the vocabulary of the model that it drafts for.
        pool: its KV cache, with as many blocks as the model's, and the same block size.
        max_tokens: the most tokens of one pass.
        max_positions: longest sequence that it takes, in tokens.
    """

    model: Model
    pool: KVCacheMemory
    max_tokens: int
    max_positions: int

    def run(self, inputs: ForwardInputs, rows: Sequence[int] | None = None) -> Tensor:
        """Run tokens; returns the logits of the given rows, or of all: [rows, vocab]."""
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
    """A request and its draft tokens so far.

    Args:
        state: state of the request.
        num_wanted: the number of draft tokens to make.
        states, token_ids, distributions: see ``Draft``.
        indexes: the indexes of its draft tokens among all that the step has made.
        is_open: whether more tokens may be drafted for it.
    """

    state: CachedRequest
    num_wanted: int
    states: list[SamplingState]
    token_ids: list[int] = field(default_factory=list)
    distributions: list[Tensor | None] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    is_open: bool = True

    def add(self, token_id: int | None, distribution: Tensor | None, index: int) -> None:
        """Add a draft token, unless it is NO_TOKEN or the request's grammar forbids it.

        Args:
            token_id: the token; None if only the device knows it.
            distribution: see ``Draft``.
            index: index of the token among all that the step has made.
        """
        following = None
        if token_id != NO_TOKEN:
            token_id = NO_TOKEN if token_id is None else token_id
            following = advance(self.states[-1], token_id)
        if following is not None:
            self.states.append(following)
            self.token_ids.append(token_id)
            self.distributions.append(distribution)
            self.indexes.append(index)
        self.is_open = following is not None and len(self.token_ids) < self.num_wanted


class DraftModelProposer:
    """Drafts tokens by running a draft model after the last tokens of requests.

    In each step it first runs the tokens of the requests that the draft model has not run yet, up
    to ``max_tokens``. A request that has tokens left after that gets no draft tokens in the step.

    Args:
        draft: the draft model.
        tables: block tables of the requests, shared with the model.
        sampler: chooses the draft tokens; the same that chooses the tokens.
    """

    def __init__(self, draft: DraftModel, tables: BlockTables, sampler: Sampler) -> None:
        self._draft = draft
        self._tables = tables
        self._sampler = sampler
        self._draft_kv = DraftKV(draft.pool.block_size)

    def propose(self, wanted: Sequence[DraftRequest]) -> StepDrafts:
        branches = [
            _Branch(state, count, [state]) for state, count in self._within_positions(wanted)
        ]
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
        self._draft_kv.forget(request_ids)

    def close(self) -> None:
        self._draft.pool.close()

    def _within_positions(self, wanted: Sequence[DraftRequest]) -> list[DraftRequest]:
        """Limit the draft tokens to the draft model's positions. The last one is never run."""
        limit = self._draft.max_positions
        capped = [
            DraftRequest(state, min(count, limit - len(state.token_ids) + 1))
            for state, count in wanted
        ]
        return [request for request in capped if request.num_tokens > 0]

    def _catch_up(self, branches: Sequence[_Branch]) -> tuple[list[_Branch], Tensor]:
        """Run tokens that the draft model has not run yet; returns the branches that have none left
        and the logits of each of these."""
        budget = self._draft.max_tokens
        claims = []
        for branch in branches:
            state = branch.state
            blocks = partial(self._tables.block_ids, state.row)
            claim = self._draft_kv.claim(
                state.request_id, state.token_ids, blocks, budget, state.cache_salt
            )
            budget -= claim.stop - claim.start
            if claim.start < claim.stop:
                claims.append((branch, claim))
        if not claims:
            return [], torch.empty(0)
        # single tokens first, as in every batch
        claims.sort(key=lambda pair: pair[1].stop - pair[1].start > _MAX_SINGLE_TOKENS)
        return self._run_claims(claims)

    def _run_claims(
        self, claims: Sequence[tuple[_Branch, TokenRange]]
    ) -> tuple[list[_Branch], Tensor]:
        shares, tokens = ScheduledTokens([], [], []), []
        done, last_rows = [], []
        for branch, (start, stop) in claims:
            if stop - start <= _MAX_SINGLE_TOKENS:
                shares.add_single_tokens(branch.state.row, start, stop - start)
            else:
                shares.add(branch.state.row, start, stop - start)
            tokens += branch.state.token_ids[start:stop]
            if stop == len(branch.state.token_ids):
                done.append(branch)
                last_rows.append(len(tokens) - 1)
        return done, self._draft.run(self._lay_out(shares, tokens), last_rows)

    def _run_drafts(self, branches: Sequence[_Branch], newest: Tensor) -> Tensor:
        """Run the last draft token of each branch, ``newest``: [branches] int64 on the device;
        returns its logits."""
        for branch in branches:
            self._draft_kv.add_draft(branch.state.request_id, branch.token_ids)
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
    """The token ids on the host if any branch depends on them, which waits for the device; else
    None for each."""
    if any(depends_on_tokens(branch.state) for branch in branches):
        known: list[int | None] = token_ids.tolist()
        return known
    return [None] * len(branches)


def _kept(token_ids: Tensor, is_kept: Sequence[bool]) -> Tensor:
    """The token ids of the kept rows, on the device."""
    if all(is_kept):
        return token_ids
    rows = [row for row, kept in enumerate(is_kept) if kept]
    return token_ids[index_tensor(token_ids.device, rows)]


def _collect(branches: Sequence[_Branch], drafted: Sequence[Tensor]) -> StepDrafts:
    """Collect the drafts of a step, in the order of its requests."""
    if not branches:
        return NO_DRAFTS
    indexes = [index for branch in branches for index in branch.indexes]
    on_device = torch.cat(list(drafted))
    if indexes != list(range(len(on_device))):
        on_device = on_device[index_tensor(on_device.device, indexes)]
    by_request = {
        branch.state.request_id: Draft(branch.states, branch.token_ids, branch.distributions)
        for branch in branches
    }
    return StepDrafts(by_request, on_device)
