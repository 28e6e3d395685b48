"""What bounds a step and a request."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake_engine.config import LoadFailurePolicy


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step and a request.

    Args:
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: tokens in one step.
        max_model_len: tokens of one sequence; the pool has room for at least one such.
        eos_token_ids: tokens that end an answer.
        load_failure: what becomes of a request whose KV does not arrive.
        load_timeout_s: how long a request may wait for blocks to load KV into.
        watermark: share of the blocks that admitting a request leaves free for those that run.
        delay_factor: a prompt waits that many times the duration of the last step that admitted
            some, so that more come together; 0 admits at once.
        num_speculative_tokens: tokens that may be guessed ahead of each sequence's last one.
        feeds_forward: workers hand a sampled token to the next step themselves, so that a request
            may be planned again before its token is known here.
        names_arrivals: plans say which blocks peers have written, for the workers to turn them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    load_failure: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    load_timeout_s: float = 120.0
    watermark: float = 0.0
    delay_factor: float = 0.0
    num_speculative_tokens: int = 0
    feeds_forward: bool = False
    names_arrivals: bool = False
