"""Chooses whether a prefix is loaded or recomputed: minimizes the estimated seconds until its
prompt is done. Used by the scheduler. Pure: the time is an argument.

    compute(n, p)   seconds to compute a prompt's tokens p..n, from the steps so far
    load(x)         seconds to load its first x chunks, from the loads so far
    T(x)            max(compute(n, x), load(x) + compute(n, x) / layers)

Loading a layer overlaps with computing the layers before it, so the longer of the two counts, plus
one layer of the shorter. Any number x of leading chunks may be loaded; the x with the least T wins.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mooncake_kv.pool.least_squares import FadingLeastSquares

FIRST_BYTES_PER_S = 1e9
"""Assumed throughput of a source from which nothing has been loaded yet."""
FIRST_LATENCY_S = 2e-3
"""Assumed latency of such a source in seconds."""


class PrefillCosts:
    """Estimates prefill times: seconds per step, per token, and per token and token of context."""

    def __init__(self) -> None:
        self._model = FadingLeastSquares([((1.0, 0.0, 0.0), 1e-4)])

    @property
    def is_known(self) -> bool:
        """Whether any step with a prompt was measured."""
        return self._model.has_learnt

    def learn(self, num_tokens: int, num_attended: int, seconds: float, now: float) -> None:
        """Learn from a step.

        Args:
            num_tokens: tokens that it computed.
            num_attended: sum of the context lengths of these tokens.
            seconds: duration of the step.
            now: when it ended.
        """
        self._model.learn((1.0, num_tokens, num_attended), seconds, now)

    def seconds(self, start: int, stop: int, now: float) -> float:
        """Estimated seconds to compute tokens ``start`` to ``stop`` of a prompt in one step."""
        count = stop - start
        return self._model.estimate((1.0, count, count * (start + stop) / 2), now)


class LoadCosts:
    """Estimates load times by source: seconds per load, and per byte."""

    def __init__(self) -> None:
        self._models: dict[Hashable, FadingLeastSquares] = {}
        self._late: dict[Hashable, float] = {}  # time of the first timeout since the last success

    def learn(self, source: Hashable, nbytes: int, seconds: float, now: float) -> None:
        """Learn from a load that succeeded."""
        self._late.pop(source, None)
        self._model(source).learn((1.0, nbytes), seconds, now)

    def learn_late(
        self, source: Hashable, nbytes: int, seconds: float, began: float, now: float
    ) -> None:
        """Learn from a load that timed out. A single timeout may be an accident, and weighs little
        against many faster loads. If the next load times out too, all earlier samples of the source
        are discarded.

        Args:
            source: the source of the load.
            nbytes: size of the whole load.
            seconds: lower bound of the seconds that it would have taken.
            began: when it started. A load that ran concurrently with the first late one does not
                count as the next.
            now: when it timed out.
        """
        if began >= self._late.setdefault(source, now):
            self._late[source] = math.inf
            self._models[source] = _first_model()
        self._model(source).learn((1.0, nbytes), seconds, now)

    def seconds(self, source: Hashable, nbytes: int, now: float) -> float:
        """Estimated seconds to load ``nbytes`` bytes from a source."""
        return self._model(source).estimate((1.0, nbytes), now)

    def forget(self, source: Hashable) -> None:
        """Forget a source from which nothing will be loaded any more."""
        self._models.pop(source, None)
        self._late.pop(source, None)

    def _model(self, source: Hashable) -> FadingLeastSquares:
        if source not in self._models:
            self._models[source] = _first_model()
        return self._models[source]


def _first_model() -> FadingLeastSquares:
    large = FIRST_LATENCY_S + (1 << 30) / FIRST_BYTES_PER_S
    return FadingLeastSquares([((1.0, 0.0), FIRST_LATENCY_S), ((1.0, float(1 << 30)), large)])


@dataclass(frozen=True, slots=True)
class PromptToLoad:
    """A prompt of which the pool has leading chunks.

    Args:
        num_tokens: tokens of the prompt.
        num_cached: leading tokens in the device's prefix cache.
        chunk_tokens, chunk_bytes: tokens and bytes per chunk.
        sources: source of each leading chunk, including those that the device has.
        num_layers: layers of the model.
    """

    num_tokens: int
    num_cached: int
    chunk_tokens: int
    chunk_bytes: int
    sources: Sequence[Hashable]
    num_layers: int


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The best choice for a prompt.

    Args:
        num_chunks: leading chunks that the prompt will have, cached or loaded. Nothing is to be
            loaded if the device has as many.
        load_s: estimated seconds to load the missing ones.
        compute_s: estimated seconds to compute the rest.
        total_s: estimated seconds of both with their overlap.
    """

    num_chunks: int
    load_s: float
    compute_s: float
    total_s: float


def choose_load(
    prompt: PromptToLoad,
    prefill: PrefillCosts,
    loads: LoadCosts,
    now: float,
    *,
    is_always: bool = False,
) -> LoadChoice:
    """Choose how many chunks to load.

    Args:
        prompt: the prompt.
        prefill, loads: the cost models.
        now: the time of ``time.monotonic``.
        is_always: load all chunks, which is also done while no prefill has been measured.
    """
    num_layers = max(prompt.num_layers, 1)
    first = prompt.num_cached // prompt.chunk_tokens
    compute_s = prefill.seconds(prompt.num_cached, prompt.num_tokens, now)
    best = LoadChoice(first, 0.0, compute_s, compute_s)
    by_source: dict[Hashable, int] = {}
    for index in range(first, len(prompt.sources)):
        source, stop = prompt.sources[index], (index + 1) * prompt.chunk_tokens
        skipped = max(prompt.num_cached - index * prompt.chunk_tokens, 0)
        nbytes = prompt.chunk_bytes * (prompt.chunk_tokens - skipped) // prompt.chunk_tokens
        by_source[source] = by_source.get(source, 0) + nbytes
        load_s = sum(loads.seconds(name, count, now) for name, count in by_source.items())
        compute_s = prefill.seconds(stop, prompt.num_tokens, now)
        total_s = max(compute_s, load_s + compute_s / num_layers)
        if is_always or total_s <= best.total_s or not prefill.is_known:
            best = LoadChoice(index + 1, load_s, compute_s, total_s)
    return best


WAITED_SHARE = 0.25
"""A step may start at once if loading takes at most this fraction of the computing time. It hardly
waits for the first layer then, which arrives while the step is scheduled and launched."""


def layers_before_release(num_layers: int, load_s: float, compute_s: float) -> int:
    """How many layers must arrive before a step may start, so that the others arrive while these
    are computed and the step hardly waits.

    Args:
        num_layers: layers of the model.
        load_s: estimated seconds to load all layers.
        compute_s: estimated seconds of the step.
    """
    if load_s <= WAITED_SHARE * compute_s:
        return 0
    hidden = (num_layers - 1) * compute_s / load_s
    return min(max(1, math.ceil(num_layers - hidden)), num_layers)
