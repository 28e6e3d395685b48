"""The sampler: chooses tokens from logits, for a whole batch at once.

The order is: ``LogitsProcessor``, temperature, filters. Every filter (min-p, top-k, top-p) is a
threshold on the logit, so tied tokens at the edge are kept or removed together, and the support
does not depend on how a device sorts equal values. The token is found by inverting the cumulative
distribution in token order, at one uniform number derived from (seed, output position).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mooncake_engine.execution.logits_processor import LogitsProcessor
from mooncake_engine.execution.logprobs import LogprobTensors
from mooncake_engine.execution.request_table import CachedRequest, SamplingState
from mooncake_engine.execution.sampling_metadata import (
    DeviceSampling,
    RandomStream,
    column,
    uniform,
)
from mooncake_engine.execution.speculation.rejection_sampling import (
    SampledDrafts,
    rejection_weights,
)
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import SampledToken
from mooncake_hal.backend import SamplingOps
from mooncake_hal.backend_parts import index_tensor


def grammar_failures(states: Sequence[CachedRequest]) -> dict[str, str]:
    """Errors by request id, of the requests whose grammars have failed."""
    return {
        state.request_id: state.grammar.failure
        for state in states
        if state.grammar is not None and state.grammar.failure is not None
    }


_TOP_P_CANDIDATES = 1024
"""Number of the most probable tokens that top-p sorts first; while they don't suffice, it sorts
eight times as many of the rows that need more."""
_MAX_SORTED = 1 << 22
"""Number of logits beyond those that are sorted at once."""


NO_TOKEN = -1
"""Takes the place of a token id for a row without a finite logit: its request fails."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenTokens:
    """The tokens chosen for the rows of a batch, on the device or on the host.

    Args:
        token_ids: [rows] int64; NO_TOKEN for a row without a finite logit.
        logprob_rows: the rows whose requests ask for log probabilities.
        logprobs: log probabilities of the described rows; None if there are no such rows.
    """

    token_ids: Tensor
    logprob_rows: Sequence[int] = ()
    logprobs: LogprobTensors | None = None

    def moved(self, move: Callable[[Tensor], Tensor]) -> ChosenTokens:
        """A copy on another device: ``move`` copies each tensor."""
        logprobs = None if self.logprobs is None else self.logprobs.moved(move)
        return ChosenTokens(move(self.token_ids), self.logprob_rows, logprobs)

    def tokens(self) -> list[SampledToken]:
        """The tokens as host objects; waits for the device if the tensors are there."""
        token_ids: list[int] = self.token_ids.tolist()
        tokens = [SampledToken(token_id) for token_id in token_ids]
        if self.logprobs is not None:
            ids = [max(token_ids[row], 0) for row in self.logprob_rows]
            described = self.logprobs.describe(ids)
            for row, logprobs in zip(self.logprob_rows, described, strict=True):
                tokens[row] = SampledToken(token_ids[row], logprobs)
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTokens:
    """One draft token per row of a batch, on the device.

    Args:
        token_ids: [rows] int64; NO_TOKEN for a row without a finite logit.
        distributions: by row, [vocab] float32: the probabilities that the draft token was sampled
            from, for the rows that use rejection sampling; see ``rejection_weights``.
    """

    token_ids: Tensor
    distributions: Mapping[int, Tensor]


class Sampler:
    """Samples one token per row; NO_TOKEN where the row's largest logit is not finite.

    A row has no finite logit if the model overflows, the checkpoint is damaged, or the sampling
    parameters leave no token. NO_TOKEN must not reach the device as a token id: an index outside
    the vocabulary ends the process, and with it all other requests.

    Args:
        eos_token_ids: masked, with a request's stop ids, until it has ``min_tokens``.
        ops: the backend's sampling ops, used for batches that don't use rejection sampling; None
            to always sample with torch.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], ops: SamplingOps | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._ops = ops
        self._on_device = None if ops is None else DeviceSampling(ops)
        self._info: _BatchInfo | None = None

    def sample(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        drawn: SampledDrafts | None = None,
    ) -> list[SampledToken]:
        """Choose a token per row; does not append it to the states.

        Args:
            logits: [rows, vocab], in the model's type; may be overwritten.
            states: the request of each row.
            drawn: sampled draft tokens of some of the rows, for rejection sampling.
        """
        return self.choose(logits, states, drawn).tokens()

    def choose(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        drawn: SampledDrafts | None = None,
    ) -> ChosenTokens:
        """As ``sample``, but the tokens stay on the device.

        It waits for the device in one case only: top-p in torch has to check whether it has sorted
        enough tokens.

        Args:
            logits, states, drawn: see ``sample``.
        """
        info = self._info_of(logits, states)
        described = info.logprob_rows
        token_ids = self._draw(_processed(logits, info), states, drawn)
        if not described:
            return ChosenTokens(token_ids)
        rows = index_tensor(logits.device, described)
        num_top = [states[row].sampling.logprobs or 0 for row in described]
        logprobs = LogprobTensors.of(logits[rows], token_ids[rows].clamp(min=0), num_top)
        return ChosenTokens(token_ids, described, logprobs)

    def _draw(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        drawn: SampledDrafts | None,
    ) -> Tensor:
        """Choose a token per row of the processed logits: [rows] int64."""
        if not self._info_of(logits, states).random_rows:
            return self._argmax(logits)
        if self._on_device is None or drawn is not None:
            return _choose(logits, states, drawn)
        is_finite = logits.amax(dim=-1).isfinite()
        return self._on_device.sample(logits, states).masked_fill(~is_finite, NO_TOKEN)

    def draft(self, logits: Tensor, states: Sequence[SamplingState]) -> DraftedTokens:
        """Choose draft tokens from a draft model's logits, to match what ``sample`` will choose.

        Where the output must not depend on how many tokens are drafted (greedy sampling, a seed of
        the client's, a grammar), the draft token is chosen as ``sample`` does, with the same random
        number. Elsewhere it is sampled with another number and its distribution is kept, because
        rejection sampling then accepts more draft tokens. Waits for the device where ``choose``
        does.

        Args:
            logits: [rows, vocab], in the model's type; may be overwritten.
            states: the request of each row.
        """
        info = self._info_of(logits, states)
        logits = _processed(logits, info)
        rows = info.random_rows
        token_ids = self._argmax(logits)
        if not rows:
            return DraftedTokens(token_ids, {})
        at = index_tensor(logits.device, rows)
        random_states = [states[row] for row in rows]
        weights = _weights(logits[at], random_states)
        is_tested = [_uses_rejection_sampling(state) for state in random_states]
        streams = [RandomStream.DRAFT if tested else RandomStream.CHOICE for tested in is_tested]
        token_ids.index_copy_(0, at, _pick(weights, _numbers(random_states, streams)))
        weights /= weights.sum(dim=-1, keepdim=True)
        pairs = zip(rows, weights, is_tested, strict=True)
        return DraftedTokens(token_ids, {row: known for row, known, tested in pairs if tested})

    def _argmax(self, logits: Tensor) -> Tensor:
        """The token of the largest logit of each row: [rows] int64. The backend's op finds it in
        the model's type, without a copy in float32."""
        return _argmax(logits.float()) if self._ops is None else self._ops.argmax(logits)

    def _info_of(self, logits: Tensor, states: Sequence[SamplingState]) -> _BatchInfo:
        """The batch's info, which is reused while the requests are those of the previous step."""
        if self._info is None or self._info.states != states:
            self._info = _BatchInfo(states, self._eos_token_ids, logits.device)
        return self._info


class _BatchInfo:
    """The properties of a batch that stay valid as long as it has the same requests.

    Args:
        states: the request of each row.
        eos_token_ids, device: see ``LogitsProcessor``.

    Attributes:
        random_rows: the rows that don't use greedy sampling.
        logprob_rows: the rows whose requests ask for log probabilities.
        processor: changes the logits as the requests ask.
    """

    def __init__(
        self, states: Sequence[SamplingState], eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.states = states
        self.random_rows = [row for row, s in enumerate(states) if not s.sampling.is_greedy]
        self.logprob_rows = [
            row for row, state in enumerate(states) if state.sampling.logprobs is not None
        ]
        self.processor = LogitsProcessor(states, eos_token_ids, device)


def _processed(logits: Tensor, info: _BatchInfo) -> Tensor:
    """The logits as the batch's requests change them, in float32; in the model's type if they
    change nothing and all take the largest. Logits whose log probabilities are asked for are not
    overwritten."""
    if info.processor.has_effect():
        logits = logits.to(torch.float32, copy=bool(info.logprob_rows))
        info.processor.apply(logits)
    elif info.random_rows:
        logits = logits.float()
    return logits


def _uses_rejection_sampling(state: SamplingState) -> bool:
    """Whether rejection sampling may be used: whether only the token's distribution matters, and
    not which token a given seed yields."""
    sampling = state.sampling
    return not sampling.is_greedy and sampling.seed is None and sampling.grammar is None


def _choose(logits: Tensor, states: Sequence[SamplingState], drawn: SampledDrafts | None) -> Tensor:
    """Choose a token per row with torch: [rows] int64."""
    random_rows = [row for row, state in enumerate(states) if not state.sampling.is_greedy]
    if not random_rows:
        return _argmax(logits)
    is_mixed = len(random_rows) < len(states)
    random_states = [states[row] for row in random_rows]
    indexes = index_tensor(logits.device, random_rows)
    weights = _weights(logits[indexes] if is_mixed else logits.clone(), random_states)
    if drawn is not None:
        _apply_rejection(weights, random_rows, states, drawn)
    sampled = _pick(weights, _numbers(random_states, [RandomStream.CHOICE] * len(random_states)))
    return _argmax(logits).index_copy_(0, indexes, sampled) if is_mixed else sampled


def _argmax(logits: Tensor) -> Tensor:
    """The token of the largest logit of each row: [rows] int64."""
    token_ids = logits.argmax(dim=-1, keepdim=True)  # a NaN counts as largest
    largest = logits.gather(1, token_ids)
    # x - x is zero unless x is not finite: two ops, where isfinite takes four
    return token_ids.masked_fill_(largest - largest != 0, NO_TOKEN).squeeze(1)


def _apply_rejection(
    weights: Tensor, rows: Sequence[int], states: Sequence[SamplingState], drawn: SampledDrafts
) -> None:
    """Apply rejection sampling to the weights of the rows that have draft tokens, in place.

    Args:
        weights: [n, vocab] float32.
        rows: the row in the batch of each row of ``weights``, ascending, as ``drawn.rows`` is.
        states: the request of each row of the batch.
        drawn: the draft tokens.
    """
    tested = set(drawn.rows)
    at = [index for index, row in enumerate(rows) if row in tested]
    indexes = index_tensor(weights.device, at)
    numbers = _numbers([states[row] for row in drawn.rows], [RandomStream.TEST] * len(drawn.rows))
    weights.index_copy_(0, indexes, rejection_weights(weights[indexes], drawn, numbers))


def _weights(logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """The unnormalised distribution that each row is sampled from: [rows, vocab] float32.
    Overwrites ``logits`` with it."""
    params = [state.sampling for state in states]
    # the largest logit becomes 0: min-p is then a constant, and exp can't overflow
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= column(logits.device, [max(p.temperature, 1e-5) for p in params])
    if any(_has_filter(p, logits.shape[1]) for p in params):
        logits.masked_fill_(logits < _thresholds(logits, params), -math.inf)
    return logits.exp_()


def _numbers(states: Sequence[SamplingState], streams: Sequence[RandomStream]) -> list[float]:
    return [
        uniform(state.seed, state.num_output_tokens, stream)
        for state, stream in zip(states, streams, strict=True)
    ]


def _pick(weights: Tensor, numbers: Sequence[float]) -> Tensor:
    """The first token of each row at which the cumulative weight exceeds the share ``numbers`` of
    the row's total: [rows] int64."""
    # float64: a float32 sum over a large vocabulary is off by more than rare tokens weigh
    cumulative = weights.double().cumsum_(dim=-1)
    total = cumulative[:, -1:]  # NaN if the row's largest logit was not finite
    targets = column(cumulative.device, numbers, np.float64) * total
    token_ids = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    return token_ids.masked_fill_(~(total.squeeze(1) > 0), NO_TOKEN)


def _has_filter(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size or params.min_p > 0.0


def _thresholds(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest logit that the filters keep in each row: [rows, 1]. Row maxima must be 0."""
    vocab_size = logits.shape[1]
    min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    threshold = column(logits.device, min_p)
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    has_top_p = any(p.top_p < 1.0 for p in params)
    limited = [k for k in top_k if k < vocab_size]
    if not limited and not has_top_p:
        return threshold
    num_sorted = min(vocab_size, max([_TOP_P_CANDIDATES if has_top_p else 1, *limited]))
    ordered = _largest(logits, num_sorted)
    limits = index_tensor(logits.device, top_k).unsqueeze(1)
    threshold = threshold.maximum(_kth(ordered, limits, vocab_size))
    if not has_top_p:
        return threshold
    top_p = column(logits.device, [p.top_p for p in params]).double()
    total = _mass(logits, threshold).sum(dim=-1, keepdim=True)
    wanted = (top_p * total).masked_fill_(top_p >= 1.0, -math.inf)
    return _nucleus(logits, ordered, (threshold, limits), wanted)


def _largest(logits: Tensor, count: int) -> Tensor:
    """The ``count`` largest values of each row, in descending order: [rows, count].

    The row is divided into blocks. The values are all in the ``count`` blocks with the largest
    maxima, so only those blocks have to be sorted.
    """
    rows, vocab_size = logits.shape
    width = math.isqrt(vocab_size // count)
    if width < 2:
        return logits.topk(count, dim=-1).values
    whole = vocab_size // width * width
    blocks = logits[:, :whole].view(rows, -1, width)
    best = blocks.amax(dim=-1).topk(min(count, blocks.shape[1]), dim=-1).indices
    inside = blocks.gather(1, best.unsqueeze(-1).expand(-1, -1, width)).flatten(1)
    return torch.cat((inside, logits[:, whole:]), dim=1).topk(count, dim=-1).values


def _kth(ordered: Tensor, limits: Tensor, vocab_size: int) -> Tensor:
    """The ``limits``-th largest logit of each row; -inf for a row without a limit."""
    last = (limits - 1).clamp_(max=ordered.shape[1] - 1)
    return ordered.gather(1, last).masked_fill_(limits >= vocab_size, -math.inf)


def _nucleus(
    logits: Tensor, ordered: Tensor, kept: tuple[Tensor, Tensor], wanted: Tensor
) -> Tensor:
    """Raise the thresholds to those of top-p, which keeps the fewest of the most probable tokens
    whose mass reaches what is wanted. More is sorted only of the rows that need it, a few of them
    at a time: sorted at once, 256 flat rows would take gigabytes that no profile has seen.

    Args:
        logits: [rows, vocab].
        ordered: [rows, n], the largest logits in descending order.
        kept: thresholds and ranks that min-p and top-k leave; top-p counts within them.
        wanted: [rows, 1] float64, the mass; -inf for rows without top-p.
    """
    threshold, limits = kept
    count, vocab_size = ordered.shape[1], logits.shape[1]
    cumulative = _mass(ordered, threshold).cumsum(dim=-1)
    last = (cumulative < wanted).sum(dim=-1, keepdim=True)
    last = last.clamp_(max=count - 1).minimum(limits - 1)
    raised = threshold.maximum(ordered.gather(1, last)).where(wanted >= 0, threshold)
    if count == vocab_size:
        return raised
    short = ((cumulative[:, -1:] < wanted) & (limits > count)).squeeze(1).nonzero().squeeze(1)
    count = min(count * 8, vocab_size)
    at_once = max(1, _MAX_SORTED // count)
    for start in range(0, len(short), at_once):
        rows = short[start : start + at_once]
        some = logits[rows]
        kept = threshold[rows], limits[rows]
        raised[rows] = _nucleus(some, _largest(some, count), kept, wanted[rows])
    return raised


def _mass(logits: Tensor, threshold: Tensor) -> Tensor:
    """Unnormalised probability, float64, zero below the threshold."""
    return logits.masked_fill(logits < threshold, -math.inf).double().exp_()
