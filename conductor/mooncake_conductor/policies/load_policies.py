"""Policies that use load and local prefixes only, without transfers: random to Preble's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from mooncake_conductor.policies.situation import PrefillChoice, Situation

PREBLE_WINDOW_S = 180.0


class RandomPolicy:
    """A random instance."""

    def choose(self, situation: Situation) -> PrefillChoice:
        candidates = situation.candidates()
        return situation.with_local_prefix(
            int(candidates[situation.rng.randrange(len(candidates))])
        )


class RoundRobinPolicy:
    """The instances in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, situation: Situation) -> PrefillChoice:
        self._next += 1
        candidates = situation.candidates()
        return situation.with_local_prefix(int(candidates[(self._next - 1) % len(candidates)]))


class LeastLoadedPolicy:
    """The instance with the shortest queue, in seconds."""

    def choose(self, situation: Situation) -> PrefillChoice:
        return situation.with_local_prefix(situation.least(situation.queue))


class CacheLocalPolicy:
    """The least queueing plus computation, with each instance's own prefix."""

    def choose(self, situation: Situation) -> PrefillChoice:
        costs = situation.queue + situation.compute(situation.tokens(situation.own))
        return situation.with_local_prefix(situation.least(costs))


class LMetricPolicy:
    """Least tokens to compute times batch size (arXiv 2603.15202); needs no cost model."""

    def choose(self, situation: Situation) -> PrefillChoice:
        queues, slots = situation.fleet.queues, situation.slots
        new = situation.request.num_tokens - situation.tokens(situation.own)
        costs = (queues.num_tokens[slots] + new) * (queues.num_requests[slots] + 1)
        return situation.with_local_prefix(situation.least(costs))


class DynamoPolicy:
    """NVIDIA Dynamo's router cost, in blocks: blocks to compute minus credits for cached blocks.

    Args:
        device: credit for a block in device memory.
        host: credit for a block in host memory.
        disk: credit for a block on disk.
    """

    def __init__(self, device: float = 1.0, host: float = 0.75, disk: float = 0.25) -> None:
        self._credits = (device, host, disk)

    def choose(self, situation: Situation) -> PrefillChoice:
        match, slots, queues = situation.match, situation.slots, situation.fleet.queues
        device, host, local = (c[slots] for c in (match.device, match.host, match.local))
        held = zip(self._credits, (device, host - device, local - host), strict=True)
        credit = sum((share * blocks for share, blocks in held), start=np.zeros(len(slots)))
        active = queues.num_tokens[slots] / situation.fleet.chunk_tokens
        incoming = situation.request.num_tokens / situation.fleet.chunk_tokens
        costs = np.maximum(active + incoming - credit, 0.0)
        return situation.with_local_prefix(situation.least(costs))


class SGLangPolicy:
    """sglang-router's ``cache_aware``: the longest match, unless the load is imbalanced.

    The original knows only what it has sent where; here it uses the index of what instances hold,
    which is more accurate.

    Args:
        num_held: returns the number of chunks that an instance holds, by slot.
        absolute: load decides if the longest queue exceeds the shortest by this many requests...
        relative: ...and by this factor.
        threshold: share of the prompt that must match; below it the instance with the smallest
            cache takes the request.
    """

    def __init__(
        self,
        num_held: Callable[[int], int],
        absolute: float = 32.0,
        relative: float = 1.1,
        threshold: float = 0.5,
    ) -> None:
        self._num_held = num_held
        self._absolute = absolute
        self._relative = relative
        self._threshold = threshold

    def choose(self, situation: Situation) -> PrefillChoice:
        waiting = situation.fleet.queues.num_requests[situation.slots]
        longest, shortest = float(waiting.max()), float(waiting.min())
        matched = situation.tokens(situation.own) / situation.request.num_tokens
        if longest - shortest > self._absolute and longest > self._relative * shortest:
            costs = waiting
        elif float(matched.max()) > self._threshold:
            costs = -matched
        else:
            # sglang-router's tree includes requests that are not completed yet.
            sent = situation.fleet.queues.num_tokens[situation.slots] / situation.fleet.chunk_tokens
            held = [self._num_held(int(slot)) for slot in situation.slots]
            costs = sent + np.array(held, np.float64)
        return situation.with_local_prefix(situation.least(costs))


class PreblePolicy:
    """Preble's E2 (arXiv 2407.00023): exploit if more is cached than missed, else explore.

    Exploration minimises recent load plus eviction plus new prefill, in seconds. The cost of an
    eviction is assumed to be the prefill of as many tokens as the prompt adds.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, float]] = deque()
        self._load: dict[int, float] = {}

    def choose(self, situation: Situation) -> PrefillChoice:
        self._forget(situation.now)
        longest = int(situation.own.max())
        cached = longest * situation.fleet.chunk_tokens
        load = np.array([self._load.get(int(slot), 0.0) for slot in situation.slots])
        if cached > situation.request.num_tokens - cached:
            costs = np.where(situation.own == longest, load, np.inf)
        else:
            compute = situation.compute(situation.tokens(situation.own))
            costs = load + 2 * compute
        choice = situation.with_local_prefix(situation.least(costs))
        self._recent.append((situation.now, choice.slot, choice.compute))
        self._load[choice.slot] = self._load.get(choice.slot, 0.0) + choice.compute
        return choice

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - PREBLE_WINDOW_S:
            _, slot, seconds = self._recent.popleft()
            self._load[slot] = max(self._load[slot] - seconds, 0.0)
