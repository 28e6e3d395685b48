"""A worker's state of running requests: tokens, block tables, penalty counts, grammar state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.errors import GrammarFailed, InvalidRequest
from mooncake_engine.execution.penalties import TokenCounts, TokenCountTable
from mooncake_engine.sampling_params import Grammar, SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest
from mooncake_engine.text.bad_words import BadWordState
from mooncake_engine.text.grammars import GrammarMatcher, Vocabulary
from mooncake_hal.backend_parts import index_tensor

FindVocabulary = Callable[[], Vocabulary]
"""Finds or builds the process's vocabulary; called when the first request with a grammar comes."""


def no_vocabulary() -> Vocabulary:
    """A FindVocabulary for engines without a tokenizer: rejects every grammar."""
    raise InvalidRequest("this engine has no tokenizer for grammars", param="grammar")


_TOO_SLOW = "the grammar takes too much processor time to follow: make it simpler or less ambiguous"


class GrammarState:
    """The position of one request in its grammar. An error of the grammar fails only that request.

    Args:
        find_vocabulary: see ``FindVocabulary``.
        new_request: a request with a grammar. Its output so far, from another instance or from
            before a preemption, is accepted first.

    Attributes:
        failure: why the request fails by its grammar; None while it does not.
    """

    def __init__(self, find_vocabulary: FindVocabulary, new_request: NewRequest) -> None:
        grammar = new_request.sampling.grammar
        assert grammar is not None, "a request without a grammar has no grammar state"
        self.failure: str | None = None
        self._matcher = self._begin(find_vocabulary, grammar)
        allowed_token_ids = new_request.sampling.allowed_token_ids
        if self._matcher is not None and allowed_token_ids is not None:
            self._matcher.restrict(token_mask(allowed_token_ids))
        for token_id in new_request.token_ids[new_request.num_prompt_tokens :]:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """Advance by the next output token."""
        if self._matcher is not None:
            self._matcher.accept(token_id)

    def allowed(self) -> bytes | None:
        """See ``GrammarMatcher.allowed``. If the grammar fails, returns None and sets
        ``failure``."""
        if self._matcher is None:
            return None
        try:
            allowed = self._matcher.allowed()
        except GrammarFailed as exc:
            self._matcher, self.failure = None, str(exc)
            return None
        if self._matcher.is_too_slow:
            # Still followed until the step has ended: other ranks, whose clocks differ, sample the
            # same token only with the same mask.
            self.failure = _TOO_SLOW
        return allowed

    def after(self, token_id: int) -> GrammarState | None:
        """A copy of the state, one token later; None if the grammar does not allow the token."""
        allowed = self.allowed()
        if allowed is None or not allowed[token_id // 8] >> token_id % 8 & 1:
            return None
        later = copy(self)
        later._matcher = None if self._matcher is None else self._matcher.copy()
        later.accept(token_id)
        return None if later.allowed() is None else later

    def _begin(self, find_vocabulary: FindVocabulary, grammar: Grammar) -> GrammarMatcher | None:
        try:
            return find_vocabulary().matcher(grammar)
        except InvalidRequest as exc:  # the front end did not check the grammar
            self.failure = str(exc)
            return None


def token_mask(token_ids: Sequence[int]) -> bytes:
    """The mask of some tokens, at least one, in the form of ``GrammarMatcher.allowed``."""
    has_token = np.zeros(max(token_ids) + 1, dtype=np.bool_)
    has_token[np.array(token_ids, dtype=np.int64)] = True
    return np.packbits(has_token, bitorder="little").tobytes()


class BiasedTokens(NamedTuple):
    """The logit biases of one request.

    Args:
        token_ids: [n] int64.
        values: [n] float32, added to the tokens' logits each time that the request samples.
    """

    token_ids: NDArray[np.int64]
    values: NDArray[np.float32]


def biased_tokens(logit_bias: Sequence[tuple[int, float]]) -> BiasedTokens | None:
    """A request's ``logit_bias`` as arrays; None if it is empty."""
    if not logit_bias:
        return None
    token_ids, values = zip(*logit_bias, strict=True)
    return BiasedTokens(np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32))


class SamplingState(Protocol):
    """The part of a request's state that the sampler uses."""

    @property
    def row(self) -> int:
        """The request's row among those that run; its draft states have the same one."""
        ...

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        ...

    @property
    def seed(self) -> int:
        """Determines, with the output position, each random choice."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far: the position of the next one."""
        ...

    @property
    def counts(self) -> TokenCounts | None:
        """Token counts; None if the request has no penalties."""
        ...

    @property
    def grammar(self) -> GrammarState | None:
        """Grammar state; None if the output follows no grammar."""
        ...

    @property
    def bias(self) -> BiasedTokens | None:
        """The request's ``logit_bias``; None if it has none."""
        ...

    @property
    def allowed(self) -> bytes | None:
        """The mask of the request's ``allowed_token_ids``; None if it has none, or a grammar, whose
        mask then includes them."""
        ...

    @property
    def bad_words(self) -> BadWordState | None:
        """The output's position in the request's ``bad_words``; None if it has none."""
        ...


class CachedRequest:
    """One running request.

    Args:
        new_request: the request as the step plan has it.
        row: the request's row in the BlockTables.
        counts: token counts; None if the request has no penalties.
        grammar: grammar state; None if the output follows no grammar.

    Attributes:
        token_ids: all tokens so far; the last ``num_output_placeholders`` are placeholders for
            tokens whose sampling is enqueued on the device.
        is_host_bound: whether the host reads the request's logits between two steps.
        is_token_bound: whether the host must know each token before the next one is sampled.
    """

    __slots__ = (
        "allowed",
        "bad_words",
        "bias",
        "cache_salt",
        "counts",
        "grammar",
        "is_host_bound",
        "is_token_bound",
        "num_output_placeholders",
        "num_prompt_tokens",
        "request_id",
        "row",
        "sampling",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        new_request: NewRequest,
        row: int,
        counts: TokenCounts | None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = new_request.request_id
        self.sampling: SamplingParams = new_request.sampling
        self.seed = new_request.seed
        self.cache_salt = new_request.cache_salt
        self.num_prompt_tokens = new_request.num_prompt_tokens
        self.token_ids = list(new_request.token_ids)
        self.row = row
        self.counts = counts
        self.grammar = grammar
        self.num_output_placeholders = 0
        sampling = new_request.sampling
        self.is_host_bound = sampling.prompt_logprobs is not None
        # here, as batches change with each step
        self.bias = biased_tokens(sampling.logit_bias)
        allowed = None if grammar is not None else sampling.allowed_token_ids
        self.allowed = None if allowed is None else token_mask(allowed)
        output = self.token_ids[self.num_prompt_tokens :]
        self.bad_words = BadWordState.of(sampling.bad_words_token_ids, output)
        has_growing_words = self.bad_words is not None and self.bad_words.depends_on_tokens
        self.is_token_bound = grammar is not None or has_growing_words

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Append a sampled token, and update counts, grammar and bad words."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        self.follow(token_id)

    def follow(self, token_id: int) -> None:
        """Advance grammar and bad words by a token that the host knows now."""
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.bad_words is not None:
            self.bad_words = self.bad_words.after(token_id)


def add_placeholders(states: Iterable[CachedRequest]) -> None:
    """Append a placeholder to each request, none of which may be ``is_host_bound``. The token
    counts for penalties are updated by ``RequestTable.count_sampled``."""
    for state in states:
        state.token_ids.append(0)
        state.num_output_placeholders += 1


def fill_placeholders(states: Iterable[CachedRequest], token_ids: Iterable[int]) -> None:
    """Replace the oldest placeholder of each request by its token."""
    for state, token_id in zip(states, token_ids, strict=True):
        state.token_ids[-state.num_output_placeholders] = token_id
        state.num_output_placeholders -= 1
        state.follow(token_id)


class BlockTables:
    """Block tables of all running requests as one matrix, so that a batch's tables are one gather.

    A device that is not the host has a copy of the matrix, to which each step copies only the
    changes. A batch's tables are gathered on the device, so the bytes that a step copies don't grow
    with the length of its sequences.

    Args:
        num_rows: initial capacity, in requests; the matrix grows as needed.
        max_blocks: blocks of the longest table.
        device: device on which batches are gathered.
        is_accelerator: whether the device is not the host.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, device: torch.device, *, is_accelerator: bool
    ) -> None:
        self._table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._is_accelerator = is_accelerator
        shared = torch.from_numpy(self._table)
        self._on_device = torch.zeros_like(shared, device=device) if is_accelerator else shared
        self._changed: list[tuple[int, int]] = []  # ranges of indexes into the flattened matrix
        self._lengths = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    def take_row(self, block_ids: tuple[int, ...]) -> int:
        """Assign a row to a new request that holds these blocks."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._lengths[row] = 0
        self.extend(row, block_ids)
        return row

    def extend(self, row: int, block_ids: tuple[int, ...], at: int | None = None) -> None:
        """Append blocks to a row, or write them from index ``at`` on and drop any after them."""
        start = self._lengths[row] if at is None else at
        stop = start + len(block_ids)
        self._table[row, start:stop] = block_ids
        self._lengths[row] = stop
        if self._is_accelerator:
            first = row * self._table.shape[1]
            self._changed.append((first + start, first + stop))

    def block_ids(self, row: int, start: int) -> list[int]:
        """The blocks of a row from index ``start`` on."""
        found: list[int] = self._table[row, start : self._lengths[row]].tolist()
        return found

    def free_row(self, row: int) -> None:
        """Release the row of a request that has ended. Its block ids stay, as valid padding."""
        self._free.append(row)

    def find(self, rows: NDArray[np.int64], indexes: NDArray[np.int64]) -> NDArray[np.int32]:
        """The block of each row at the given index, looked up on the host: [rows] int32."""
        return self._table[rows, indexes]

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]] | tuple[()]:
        """The indexes of the flattened matrix whose cells are stale on the device, and their
        current values, which the caller must pass to ``gather``. Each change is returned once;
        empty if there are none."""
        if not self._changed:
            return ()
        cells = np.concatenate([np.arange(*changed) for changed in self._changed])
        self._changed.clear()
        return cells, self._table.reshape(-1)[cells]

    def gather(self, rows: Tensor, num_blocks: int, changes: Sequence[Tensor] = ()) -> Tensor:
        """The leading ``num_blocks`` of each row, on the device: [rows, num_blocks] int32.

        Args:
            rows: [rows] int64, on the device.
            num_blocks: blocks of the longest of the rows.
            changes: the result of ``take_changes``, on the device.
        """
        if changes:
            cells, block_ids = changes
            self._on_device.view(-1).index_copy_(0, cells, block_ids)
        return self._on_device[:, :num_blocks].index_select(0, rows)

    def _grow(self) -> None:
        old_rows = len(self._lengths)
        self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        if self._is_accelerator:
            grown = (self._on_device, torch.zeros_like(self._on_device))
            self._on_device = torch.cat(grown)
        else:
            self._on_device = torch.from_numpy(self._table)
        self._lengths += [0] * old_rows
        self._free = list(range(2 * old_rows - 1, old_rows - 1, -1))


class RequestTable:
    """All running requests of a worker.

    Args:
        max_seqs: initial capacity, in requests.
        max_blocks: blocks of the longest block table.
        vocab_size: vocabulary size of the model.
        device: device of the batches and of the token counts for penalties.
        find_vocabulary: finds the vocabulary for requests with a grammar.
        is_sampling: whether this rank samples; if not, penalties and grammars are not tracked.
    """

    def __init__(
        self,
        max_seqs: int,
        max_blocks: int,
        vocab_size: int,
        device: torch.device,
        find_vocabulary: FindVocabulary = no_vocabulary,
        *,
        is_sampling: bool = True,
    ) -> None:
        is_accelerator = device.type != "cpu"
        self.tables = BlockTables(max_seqs, max_blocks, device, is_accelerator=is_accelerator)
        self._counts = TokenCountTable(vocab_size, device)
        self._device = device
        self._find_vocabulary = find_vocabulary
        self._is_sampling = is_sampling
        self._states: dict[str, CachedRequest] = {}
        self.num_host_bound = 0
        """Number of requests that are ``CachedRequest.is_host_bound``."""
        self.num_token_bound = 0
        """Number of requests that are ``CachedRequest.is_token_bound``."""
        self.num_grammars = 0
        """Number of requests that have a grammar."""
        self._num_penalised = 0

    def __getitem__(self, request_id: str) -> CachedRequest:
        return self._states[request_id]

    def find(self, request_ids: Iterable[str]) -> list[CachedRequest]:
        """The states of several requests, in their order."""
        return list(map(self._states.__getitem__, request_ids))

    def __len__(self) -> int:
        return len(self._states)

    def admit(self, requests: Iterable[NewRequest]) -> None:
        """Add requests. A request that runs again replaces its earlier state."""
        for new_request in requests:
            self.remove((new_request.request_id,))
            row = self.tables.take_row(new_request.block_ids)
            state = CachedRequest(
                new_request, row, self._count_tokens(new_request), self._grammar(new_request)
            )
            self._states[new_request.request_id] = state
            self.num_host_bound += state.is_host_bound
            self.num_token_bound += state.is_token_bound
            self.num_grammars += state.grammar is not None
            self._num_penalised += state.counts is not None

    def append(self, request_id: str, token_ids: Iterable[int]) -> None:
        """Append tokens that another rank sampled; does nothing if the request was removed."""
        state = self._states.get(request_id)
        if state is not None:
            for token_id in token_ids:
                state.append(token_id)

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove requests. Ids that are unknown, or were removed before, are ignored."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self.tables.free_row(state.row)
                self.num_host_bound -= state.is_host_bound
                self.num_token_bound -= state.is_token_bound
                self.num_grammars -= state.grammar is not None
                if state.counts is not None:
                    self._num_penalised -= 1
                    self._counts.free(state.counts)

    def count_sampled(self, states: Sequence[CachedRequest], token_ids: Tensor) -> None:
        """Count sampled tokens that the host does not know yet, for the requests with penalties.

        Args:
            states: the requests that sampled.
            token_ids: [states] int64, on the device.
        """
        if not self._num_penalised:
            return
        counted = [
            (index, state.counts.row)
            for index, state in enumerate(states)
            if state.counts is not None
        ]
        if counted:
            at, rows = zip(*counted, strict=True)
            chosen = token_ids[index_tensor(self._device, at)]
            self._counts.add_tokens(index_tensor(self._device, rows), chosen)

    def _grammar(self, new_request: NewRequest) -> GrammarState | None:
        if new_request.sampling.grammar is None or not self._is_sampling:
            return None
        return GrammarState(self._find_vocabulary, new_request)

    def _count_tokens(self, new_request: NewRequest) -> TokenCounts | None:
        if not new_request.sampling.has_penalties or not self._is_sampling:
            return None
        split = new_request.num_prompt_tokens
        tokens = new_request.token_ids
        return self._counts.add_request(tokens[:split], tokens[split:])
