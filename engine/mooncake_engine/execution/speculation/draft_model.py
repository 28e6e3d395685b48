"""Draft tokens of a smaller model with the same vocabulary (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mooncake_engine.execution.input_batch import ForwardInputs, ScheduledTokens, lay_out
from mooncake_engine.execution.request_table import BlockTables, CachedRequest, SamplingState
from mooncake_engine.execution.sampler import NO_TOKEN, Sampler
from mooncake_engine.execution.speculation.draft_kv import DraftKV, TokenRange
from mooncake_engine.execution.speculation.drafts import Draft, DraftRequest, advance
from mooncake_engine.execution.speculation.rejection_sampling import DraftToken
from mooncake_engine.kv_cache.kv_pool import KVPool
from mooncake_engine.models.catalog import Model
from mooncake_engine.models.parallel_context import ForwardContext

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

    def run(self, inputs: ForwardInputs, rows: Sequence[int]) -> Tensor:
        """Logits behind some of the tokens: [rows, vocab] float32."""
        kv = {index: self.pool.layer(index) for index in range(self.pool.shard.layers)}
        context = ForwardContext(inputs.attention, kv)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, context)
        if not rows:
            return hidden[:0]
        return self.model.logits(hidden[torch.tensor(rows, device=hidden.device)])


@dataclass(slots=True, eq=False)
class _Branch:
    """A request and the draft tokens for it so far."""

    state: CachedRequest
    num_wanted: int
    states: list[SamplingState]
    draft_tokens: list[DraftToken]
    is_open: bool = True

    def add(self, draft_token: DraftToken) -> None:
        """Take a draft token in, unless there is none or the request's grammar forbids it."""
        following = None
        if draft_token.token_id != NO_TOKEN:
            following = advance(self.states[-1], draft_token.token_id)
        if following is not None:
            self.states.append(following)
            self.draft_tokens.append(draft_token)
        self.is_open = following is not None and len(self.draft_tokens) < self.num_wanted


class DraftModelProposer:
    """Runs a draft model behind the last tokens of requests.

    It first catches up with what it has not run of them, within ``max_tokens`` per step: a request
    that is not done with that gets no draft tokens in this step.

    Args:
        draft: the model.
        tables: block tables of the requests, the model's own.
        sampler: chooses draft_tokens, as it chooses tokens.
    """

    def __init__(self, draft: DraftModel, tables: BlockTables, sampler: Sampler) -> None:
        self._draft = draft
        self._tables = tables
        self._sampler = sampler
        self._books = DraftKV(draft.pool.block_size)

    def propose(self, wanted: Sequence[DraftRequest]) -> dict[str, Draft]:
        branches = [_Branch(state, count, [state], []) for state, count in self._possible(wanted)]
        caught_up, logits = self._catch_up(branches)
        unfinished = caught_up
        while unfinished:
            states = [branch.states[-1] for branch in unfinished]
            for branch, draft_token in zip(
                unfinished, self._sampler.draft(logits, states), strict=True
            ):
                branch.add(draft_token)
            unfinished = [branch for branch in unfinished if branch.is_open]
            if unfinished:
                logits = self._run_drafts(unfinished)
        return {
            branch.state.request_id: Draft(branch.states, branch.draft_tokens)
            for branch in caught_up
            if branch.draft_tokens
        }

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
        return done, self._run(shares, tokens, last_rows)

    def _run_drafts(self, branches: Sequence[_Branch]) -> Tensor:
        """Run each branch's last draft token; logits behind it."""
        tokens = [branch.draft_tokens[-1].token_id for branch in branches]
        for branch, token_id in zip(branches, tokens, strict=True):
            self._books.add_draft(branch.state.request_id, token_id)
        shares = ScheduledTokens(
            [branch.state.row for branch in branches],
            [len(branch.state.token_ids) + len(branch.draft_tokens) - 1 for branch in branches],
            [1] * len(branches),
        )
        return self._run(shares, tokens, range(len(tokens)))

    def _run(
        self, shares: ScheduledTokens, token_ids: Sequence[int], rows: Sequence[int]
    ) -> Tensor:
        pool = self._draft.pool
        inputs = lay_out(shares, token_ids, self._tables, pool.block_size, pool.device)
        return self._draft.run(inputs, rows)
