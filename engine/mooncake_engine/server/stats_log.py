"""Logs the engine's throughput and queues every few seconds, with the same statistics as vLLM."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mooncake_engine.messages import EngineStats

logger = logging.getLogger(__name__)


class StatsLog:
    """Logs the activity since the previous line; logs nothing while the engine is idle.

    Args:
        read: returns a snapshot of the engine.
        interval_s: seconds between lines; 0 disables the log.
    """

    def __init__(self, read: Callable[[], EngineStats], interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._before: tuple[EngineStats, float] | None = None
        self._was_idle = True

    def tick(self, now: float) -> None:
        """Log a line if one is due. Call this periodically, with ``now`` in seconds of
        ``time.monotonic``."""
        if not self._interval_s:
            return
        if self._before is None:
            self._before = self._read(), now
        earlier, since = self._before
        if now - since < self._interval_s:
            return
        stats = self._read()
        self._before = stats, now
        is_idle = _work(stats) == _work(earlier) and not stats.num_running + stats.num_waiting
        # The first idle line is logged, too: it shows that all requests have finished.
        if not is_idle or not self._was_idle:
            logger.info("%s", stats_line(earlier, stats, now - since))
        self._was_idle = is_idle


def _work(stats: EngineStats) -> tuple[int, int]:
    return stats.prompt_tokens, stats.generation_tokens


def stats_line(earlier: EngineStats, stats: EngineStats, seconds: float) -> str:
    """The log line for the activity between two snapshots taken ``seconds`` apart."""
    tokens_in = (stats.prompt_tokens - earlier.prompt_tokens) / seconds
    tokens_out = (stats.generation_tokens - earlier.generation_tokens) / seconds
    num_queried = stats.prefix_cache_queries - earlier.prefix_cache_queries
    num_hit = stats.prefix_cache_hits - earlier.prefix_cache_hits
    num_queued = stats.num_waiting - stats.num_swapped
    loading = f" ({stats.num_loading} for KV)" if stats.num_loading else ""
    return (
        f"prompts: {tokens_in:.1f} tokens/s, generation: {tokens_out:.1f} tokens/s, "
        f"running: {stats.num_running}, waiting: {num_queued}{loading}, "
        f"swapped: {stats.num_swapped}, KV cache usage: {stats.kv_cache_usage:.1%}, "
        f"prefix cache hit rate: {f'{num_hit / num_queried:.1%}' if num_queried else '-'}"
    )
