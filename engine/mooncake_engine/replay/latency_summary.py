"""Computes latency and throughput statistics from the records of a run's requests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """The measurements of one request. Times are readings of one clock, in seconds.

    Args:
        index: the request's index in the trace.
        planned_s: when the request was scheduled to be sent.
        sent_s, end_s: when it was sent, and when it finished.
        piece_times_s: when each piece of text was received.
        num_input, num_output, num_cached: tokens of prompt and answer, and cached prompt tokens, as
            the endpoint counts them.
        error: why the request failed or was rejected; None if it was answered.
        is_refused: whether the endpoint rejected the request for lack of capacity (429, 503).
        request_id: the ``X-Request-Id`` that was sent; empty for none.
        pieces: the pieces of text that were received.
    """

    index: int
    planned_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    piece_times_s: list[float] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    num_cached: int = 0
    error: str | None = None
    is_refused: bool = False
    request_id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """Time to first token. Like the other latencies, defined for answered requests only."""
        return self.piece_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time from sending the request to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between consecutive pieces of text."""
        return [later - sooner for sooner, later in pairwise(self.piece_times_s)]

    @property
    def tbt_s(self) -> float:
        """Time between tokens as Mooncake measures it (FAST '25): the mean of the longest tenth of
        the gaps."""
        gaps = sorted(self.gaps_s)
        longest = gaps[-math.ceil(len(gaps) / 10) :]
        return sum(longest) / len(longest) if longest else 0.0


@dataclass(frozen=True, slots=True)
class UnloadedLatency:
    """The latency of requests on an idle endpoint, by prompt length.

    Args:
        num_input: the measured prompt lengths in tokens, ascending; at least one.
        ttft_s, tbt_s: the latencies at each of these lengths.
    """

    num_input: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tbt_s: tuple[float, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> UnloadedLatency:
        """From requests that were sent one after another; of several with the same length, the last
        one counts."""
        by_length = {record.num_input: record for record in records}
        ordered = [by_length[length] for length in sorted(by_length)]
        return cls(
            tuple(record.num_input for record in ordered),
            tuple(record.ttft_s for record in ordered),
            tuple(record.tbt_s for record in ordered),
        )

    def ttft_times(self, record: Record) -> float:
        """A request's TTFT as a multiple of the unloaded TTFT for its prompt length."""
        return record.ttft_s / max(self._at(self.ttft_s, record.num_input), 1e-9)

    def tbt_times(self, record: Record) -> float | None:
        """A request's TBT as a multiple of the unloaded TBT; None where either has no gaps."""
        unloaded = self._at(self.tbt_s, record.num_input)
        return record.tbt_s / unloaded if unloaded and record.gaps_s else None

    def _at(self, values: Sequence[float], num_input: int) -> float:
        """The value at a prompt length: interpolated between the measured lengths, and that of the
        nearest one outside of them."""
        above = bisect_left(self.num_input, num_input)
        if above == 0:
            return values[0]
        if above == len(values):
            return values[-1]
        low, high = self.num_input[above - 1], self.num_input[above]
        share = (num_input - low) / (high - low)
        return values[above - 1] + share * (values[above] - values[above - 1])


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latency objectives that a good answer meets; None is no limit.

    Args:
        ttft_s, tbt_s: limits in seconds.
        ttft_times, tbt_times: limits as multiples of the latency in ``unloaded``.
        unloaded: the latency of an idle endpoint; needed for multiples.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    ttft_times: float | None = None
    tbt_times: float | None = None
    unloaded: UnloadedLatency | None = None

    @property
    def needs_unloaded(self) -> bool:
        """Whether any limit is a multiple."""
        return self.ttft_times is not None or self.tbt_times is not None

    def is_met(self, record: Record) -> bool:
        """Whether the request was answered within all limits."""
        return (
            record.error is None
            and (self.ttft_s is None or record.ttft_s <= self.ttft_s)
            and (self.tbt_s is None or record.tbt_s <= self.tbt_s)
            and self._meets_multiples(record)
        )

    def _meets_multiples(self, record: Record) -> bool:
        if self.unloaded is None:
            return True
        ttft, tbt = self.unloaded.ttft_times(record), self.unloaded.tbt_times(record)
        return (self.ttft_times is None or ttft <= self.ttft_times) and (
            self.tbt_times is None or tbt is None or tbt <= self.tbt_times
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and maximum of a set of values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """The distribution of any number of values; all zero if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Summary:
    """The statistics of a replay. Times in seconds, rates per second.

    Args:
        num_requests, num_refused, num_failed: requests sent; those rejected for lack of capacity
            (429, 503); those not answered completely for another reason.
        duration_s: time from the first request to the end of the last answer.
        ttft_s, tbt_s, e2e_s: time to first token, time between pieces, and total time of answered
            requests.
        ttft_times, tbt_times: TTFT and TBT as multiples of the unloaded latency; None where that
            was not measured.
        late_s: how much later than planned requests were sent; a large value means that the client
            could not keep up.
        requests_per_s, input_tokens_per_s, output_tokens_per_s: throughput.
        goodput_per_s: requests per second that met the objective.
        good_share: the share of all requests that met the objective.
        cached_share: the share of prompt tokens that were cached.
    """

    num_requests: int
    num_refused: int
    num_failed: int
    duration_s: float
    ttft_s: Distribution
    tbt_s: Distribution
    e2e_s: Distribution
    late_s: Distribution
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput_per_s: float
    good_share: float
    cached_share: float
    ttft_times: Distribution | None = None
    tbt_times: Distribution | None = None


def summarise(records: Sequence[Record], objective: LatencyTargets) -> Summary:
    """The statistics of a replay with at least one request."""
    answered = [record for record in records if record.error is None]
    start, end = min(r.sent_s for r in records), max(r.end_s for r in records)
    duration = max(end - start, 1e-9)
    num_good = sum(objective.is_met(record) for record in records)
    num_input = sum(record.num_input for record in answered)
    num_refused = sum(record.is_refused for record in records)
    ttft_times, tbt_times = _multiples(answered, objective.unloaded)
    return Summary(
        num_requests=len(records),
        num_refused=num_refused,
        num_failed=len(records) - len(answered) - num_refused,
        duration_s=duration,
        ttft_s=Distribution.of([record.ttft_s for record in answered]),
        tbt_s=Distribution.of([gap for record in answered for gap in record.gaps_s]),
        e2e_s=Distribution.of([record.e2e_s for record in answered]),
        late_s=Distribution.of([max(record.sent_s - record.planned_s, 0.0) for record in records]),
        requests_per_s=len(answered) / duration,
        input_tokens_per_s=num_input / duration,
        output_tokens_per_s=sum(record.num_output for record in answered) / duration,
        goodput_per_s=num_good / duration,
        good_share=num_good / len(records),
        cached_share=sum(record.num_cached for record in answered) / max(num_input, 1),
        ttft_times=ttft_times,
        tbt_times=tbt_times,
    )


def _multiples(
    answered: Sequence[Record], unloaded: UnloadedLatency | None
) -> tuple[Distribution, Distribution] | tuple[None, None]:
    if unloaded is None:
        return None, None
    tbt = [times for times in map(unloaded.tbt_times, answered) if times is not None]
    return Distribution.of(list(map(unloaded.ttft_times, answered))), Distribution.of(tbt)


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of ascending values, interpolated linearly.

    Args:
        share: the quantile, from 0 to 1.
    """
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
