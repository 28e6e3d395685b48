"""Whether a prefix is loaded, computed again, or waited for: the least seconds until its prompt is
done. Pure: time is an argument.

    compute(n, p)   seconds to compute a prompt's tokens p..n, from the steps so far
    load(x)         seconds to load its first x chunks, from the loads so far
    T(x)            max(compute(n, x), load(x) + compute(n, x) / layers)

Layer by layer a load hides behind the computing of the layers before it, so the longer of the two
counts, and one layer of the shorter. Any number of chunks may be loaded: the x with the least T.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from mooncake_kv.pool.least_squares import FadingLeastSquares

FIRST_BYTES_PER_S = 1e9
FIRST_LATENCY_S = 2e-3
"""Of a store that nothing was loaded from yet."""


class PrefillCosts:
    """What computing takes: seconds per step, per token, and per token of context of each token."""

    def __init__(self) -> None:
        self._model = FadingLeastSquares([((1.0, 0.0, 0.0), 1e-4)])

    @property
    def is_known(self) -> bool:
        """Whether any step with a prompt was measured."""
        return self._model.has_learnt

    def learn(self, num_tokens: int, num_attended: int, seconds: float, now: float) -> None:
        """A step took that long.

        Args:
            num_tokens: that it ran.
            num_attended: tokens that these attended to, added up.
            seconds: from its begin to its end.
            now: when it was over.
        """
        self._model.learn((1.0, num_tokens, num_attended), seconds, now)

    def seconds(self, start: int, stop: int, now: float) -> float:
        """To compute the tokens ``start`` to ``stop`` of a prompt, in one step."""
        count = stop - start
        return self._model.estimate((1.0, count, count * (start + stop) / 2), now)


class LoadCosts:
    """What loading takes, by where from: seconds per load, and per byte."""

    def __init__(self) -> None:
        self._models: dict[Hashable, FadingLeastSquares] = {}
        self._late: dict[Hashable, float] = {}  # when the first one was since the last that was not

    def learn(self, source: Hashable, nbytes: int, seconds: float, now: float) -> None:
        """A load of that much took that long."""
        self._late.pop(source, None)
        self._model(source).learn((1.0, nbytes), seconds, now)

    def learn_late(
        self, source: Hashable, nbytes: int, seconds: float, began: float, now: float
    ) -> None:
        """A load was given up. One may be an accident, and weighs little beside many that were much
        faster; if the next one is given up, too, these say nothing any more.

        Args:
            source: from where.
            nbytes: of all of it.
            seconds: that it would have taken, at least.
            began: when; what ran beside another that was late is no next one.
            now: when it was over.
        """
        if began >= self._late.setdefault(source, now):
            self._late[source] = math.inf
            self._models[source] = _first_model()
        self._model(source).learn((1.0, nbytes), seconds, now)

    def seconds(self, source: Hashable, nbytes: int, now: float) -> float:
        """To load that much."""
        return self._model(source).estimate((1.0, nbytes), now)

    def forget(self, source: Hashable) -> None:
        """Nothing is loaded from there any more."""
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
    """A prompt of which the pool has something.

    Args:
        num_tokens: of the prompt.
        num_cached: leading tokens that the device has.
        chunk_tokens, chunk_bytes: of a chunk.
        sources: where each leading chunk is; those that the device has are among them.
        num_layers: of the model.
    """

    num_tokens: int
    num_cached: int
    chunk_tokens: int
    chunk_bytes: int
    sources: Sequence[Hashable]
    num_layers: int


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What is best.

    Args:
        num_chunks: leading chunks that the prompt has then, of the device or loaded; none are to be
            loaded if that is no more than the device has.
        load_s: what loading them takes.
        compute_s: what computing the rest takes.
        total_s: both, as far as they overlap.
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
    """How many chunks to load.

    Args:
        prompt: of which the pool has something.
        prefill, loads: what was measured.
        now: by ``time.monotonic``.
        is_always: all that there are, as where computing was never measured.
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
"""A step may begin at once where a layer is loaded in that share of the time that one takes to
compute: it hardly waits for the first one, which comes in while it is scheduled and begins."""


def layers_before_release(num_layers: int, load_s: float, compute_s: float) -> int:
    """How many layers are to be there before a step may begin, so that it hardly waits for others:
    the rest comes in while these are computed.

    Args:
        num_layers: of the model.
        load_s: of all layers.
        compute_s: of the step.
    """
    if load_s <= WAITED_SHARE * compute_s:
        return 0
    hidden = (num_layers - 1) * compute_s / load_s
    return min(max(1, math.ceil(num_layers - hidden)), num_layers)
