"""What a worker remembers of the requests it runs: tokens, block tables, counts for penalties."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mooncake_engine.execution.grammar_state import (
    FindVocabulary,
    GrammarState,
    no_vocabulary,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.plan import AdmittedRequest


class TokenCounts:
    """How often each token occurs in a request, kept up with every token; on the device.

    Args:
        vocab_size: length of the counts.
        prompt, output: tokens so far.
        device: where the counts live.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt: tuple[int, ...],
        output: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.output = _histogram(output, vocab_size).to(device)
        """[vocab] float32, occurrences in the answer."""
        self.is_seen = (_histogram(prompt, vocab_size).to(device) + self.output) > 0
        """[vocab] bool, whether a token occurs in prompt or answer."""

    def add(self, token_id: int) -> None:
        """Count one more token of the answer."""
        self.output[token_id] += 1
        self.is_seen[token_id] = True

    def after(self, token_id: int) -> TokenCounts:
        """Counts of their own, one token later."""
        later = copy(self)
        later.output, later.is_seen = self.output.clone(), self.is_seen.clone()
        later.add(token_id)
        return later


def _histogram(tokens: tuple[int, ...], vocab_size: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size).float()


class SamplingState(Protocol):
    """What the sampler looks at of a request."""

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        ...

    @property
    def seed(self) -> int:
        """Fixes, with the output position, each random choice."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the answer so far: the position of the next one."""
        ...

    @property
    def counts(self) -> TokenCounts | None:
        """For requests with penalties."""
        ...

    @property
    def grammar(self) -> GrammarState | None:
        """For requests whose answer follows one."""
        ...


class RequestState:
    """One running request.

    Args:
        admitted: what the scheduler told.
        row: its row in the BlockTables.
        counts: for requests with penalties.
        grammar: for requests whose answer follows one.

    Attributes:
        token_ids: all so far; the last ``num_promised`` of them stand for tokens that a device
            has been told to sample.
        is_host_bound: whether its tokens, or what is said of them, are settled on the host.
    """

    __slots__ = (
        "counts",
        "grammar",
        "is_host_bound",
        "num_promised",
        "num_prompt_tokens",
        "request_id",
        "row",
        "sampling",
        "seed",
        "token_ids",
    )

    def __init__(
        self,
        admitted: AdmittedRequest,
        row: int,
        counts: TokenCounts | None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = admitted.request_id
        self.sampling: SamplingParams = admitted.sampling
        self.seed = admitted.seed
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.token_ids = list(admitted.token_ids)
        self.row = row
        self.counts = counts
        self.grammar = grammar
        self.num_promised = 0
        sampling = admitted.sampling
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.is_host_bound = has_logprobs or counts is not None or grammar is not None

    @property
    def num_output_tokens(self) -> int:
        """See ``SamplingState``."""
        return len(self.token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        """Learn a sampled token."""
        self.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)

    def promise(self) -> None:
        """One more token will be known; not of a request that ``is_host_bound``."""
        self.token_ids.append(0)
        self.num_promised += 1

    def keep_promise(self, token_id: int) -> None:
        """The oldest token that was promised is known."""
        self.token_ids[-self.num_promised] = token_id
        self.num_promised -= 1


class BlockTables:
    """Block tables of all running requests as one matrix, so that a batch is one indexing.

    Args:
        num_rows: requests to have room for at first; more make it grow.
        max_blocks: longest table, in blocks.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self._table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self._lengths = [0] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    def take_row(self, block_ids: tuple[int, ...]) -> int:
        """A row for a new request that holds these blocks."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._lengths[row] = 0
        self.extend(row, block_ids)
        return row

    def extend(self, row: int, block_ids: tuple[int, ...], at: int | None = None) -> None:
        """Append blocks to a row, or put them in from index ``at`` on, which is its new end."""
        start = self._lengths[row] if at is None else at
        stop = start + len(block_ids)
        self._table[row, start:stop] = block_ids
        self._lengths[row] = stop

    def block_ids(self, row: int, start: int) -> list[int]:
        """A row's blocks from index ``start`` on."""
        found: list[int] = self._table[row, start : self._lengths[row]].tolist()
        return found

    def free_row(self, row: int) -> None:
        """The row's request is gone. Its ids stay as padding: they are valid block ids."""
        self._free.append(row)

    def gather(self, rows: NDArray[np.int64], num_blocks: int) -> NDArray[np.int32]:
        """The leading ``num_blocks`` of each row: [rows, num_blocks]."""
        return self._table[rows, :num_blocks]

    def _grow(self) -> None:
        old_rows = len(self._lengths)
        self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        self._lengths += [0] * old_rows
        self._free = list(range(2 * old_rows - 1, old_rows - 1, -1))


class RequestTable:
    """All running requests of a worker.

    Args:
        max_seqs: requests to have room for at first.
        max_blocks: longest block table.
        vocab_size: the model's.
        device: where counts for penalties live.
        find_vocabulary: for requests whose answer follows a grammar.
        is_sampling: whether tokens are chosen here: else nobody asks for penalties and grammars.
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
        self.tables = BlockTables(max_seqs, max_blocks)
        self._vocab_size = vocab_size
        self._device = device
        self._find_vocabulary = find_vocabulary
        self._is_sampling = is_sampling
        self._states: dict[str, RequestState] = {}

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def __len__(self) -> int:
        return len(self._states)

    def admit(self, requests: Iterable[AdmittedRequest]) -> None:
        """Learn requests, replacing what was known of those that run again."""
        for admitted in requests:
            self.retire((admitted.request_id,))
            row = self.tables.take_row(admitted.block_ids)
            state = RequestState(admitted, row, self._counts(admitted), self._grammar(admitted))
            self._states[admitted.request_id] = state

    def append(self, request_id: str, token_ids: Iterable[int]) -> None:
        """Learn tokens that were sampled elsewhere; a request that is gone needs none."""
        state = self._states.get(request_id)
        if state is not None:
            for token_id in token_ids:
                state.append(token_id)

    def retire(self, request_ids: Iterable[str]) -> None:
        """Forget requests; unknown ones were never admitted here, or were retired before."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self.tables.free_row(state.row)

    def _grammar(self, admitted: AdmittedRequest) -> GrammarState | None:
        if admitted.sampling.grammar is None or not self._is_sampling:
            return None
        return GrammarState(self._find_vocabulary, admitted)

    def _counts(self, admitted: AdmittedRequest) -> TokenCounts | None:
        if not admitted.sampling.has_penalties or not self._is_sampling:
            return None
        split = admitted.num_prompt_tokens
        tokens = admitted.token_ids
        return TokenCounts(self._vocab_size, tokens[:split], tokens[split:], self._device)
