"""Random requests of every kind at random steps, each answer compared with the request's alone.

A seed determines the traffic, and when each choice reaches the core. Each choice must be answered
as it is by itself on an engine with plenty of memory, whatever else runs, ends or is preempted; and
afterwards nothing may be left of any of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core import EngineCore
from mooncake_engine.core_messages import AbortRequest, AddRequest
from mooncake_engine.data_parallel_core import DataParallelCore
from mooncake_engine.errors import RequestFailed
from mooncake_engine.messages import EngineRequest, FinishReason, TokenLogprobs, TokenUpdate
from mooncake_engine.sampling_params import Grammar, GrammarKind, SamplingParams
from mooncake_engine.text.completion_output import TextOutputProcessor
from mooncake_engine.text.grammars import choice_grammar
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.pool.pool_config import read_kv_pool

VOCABULARY = range(3, 256)
"""The byte tokenizer's tokens that occur in prompts."""
LOGPROB_TOLERANCE = 1e-3
SETTLE_S = 30.0

GRAMMARS = (
    Grammar(GrammarKind.REGEX, "[a-f]{2,9}(x|y)"),
    Grammar(GrammarKind.REGEX, "([a-z]+ ){1,4}!"),
    choice_grammar(["yes", "no", "never", "not at all"]),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [1, 22, 333]}}'),
)
CONSTRAINTS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda draw: {"repetition_penalty": draw.choice([0.8, 1.3]), "frequency_penalty": 0.3},
    lambda draw: {"presence_penalty": draw.uniform(-1.0, 1.0)},
    lambda draw: {"logit_bias": tuple((draw.choice(VOCABULARY), 4.0) for _ in range(3))},
    lambda draw: {"logprobs": draw.randrange(4)},
    lambda draw: {"prompt_logprobs": draw.randrange(3)},
    lambda draw: {"bad_words_token_ids": tuple(_words(draw))},
    lambda draw: {"allowed_token_ids": tuple(draw.sample(VOCABULARY, 40))},
    lambda draw: {"stop": tuple(draw.sample("abcdefghijklmnopqrstuvwxyz0123456789", 9))},
    lambda draw: {"stop_token_ids": tuple(draw.sample(VOCABULARY, 25))},
    lambda draw: {"top_p": draw.uniform(0.3, 1.0), "top_k": draw.choice([0, 5, 50])},
    lambda draw: {"min_p": draw.uniform(0.0, 0.2)},
)


@dataclass(frozen=True)
class Call:
    """What a client sends at once.

    Args:
        prompt, sampling: of all choices; each has a seed of its own.
        arrivals: the step in which each choice reaches the core, in no order.
        leaves_at: the step in which the client leaves; None if it stays.
        priority, cache_salt: see ``EngineRequest``.
    """

    prompt: tuple[int, ...]
    sampling: tuple[SamplingParams, ...]
    arrivals: tuple[int, ...]
    leaves_at: int | None
    priority: int
    cache_salt: str


@dataclass
class Answer:
    """What arrived of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: tuple[FinishReason | None, str | int | None] | str | None = None
    """Finish reason and stop reason, or the error; None while it is live."""

    def difference(self, alone: Answer) -> str | None:
        """How it differs from the answer of the same request alone; None if it does not. One whose
        client left may end early."""
        has_left = self.end == (FinishReason.ABORT, None)
        expected = alone.token_ids[: len(self.token_ids)] if has_left else alone.token_ids
        if self.token_ids != expected:
            return f"tokens {self.token_ids}, alone {alone.token_ids}"
        if self.text != alone.text and not has_left:
            return f"text {self.text!r}, alone {alone.text!r}"
        for name in ("logprobs", "prompt_logprobs"):
            found, expected = getattr(self, name), getattr(alone, name)
            if len(found) != len(expected) and not has_left:
                return f"{len(found)} {name}, alone {len(expected)}"
            for at, (one, other) in enumerate(zip(found, expected, strict=False)):
                if one.token_id != other.token_id or not _is_close(one, other):
                    return f"{name}[{at}] {one}, alone {other}"
        return None if has_left or self.end == alone.end else f"end {self.end}, alone {alone.end}"


def random_calls(seed: int, count: int, block_size: int, longest: int = 100) -> list[Call]:
    """Calls with everything that requests may have; many begin with the same tokens, or repeat an
    earlier prompt in the same step or later."""
    draw = random.Random(seed)
    stems = [_tokens(draw, longest) for _ in range(3)] + [_tokens(draw, 5) * (longest // 5)]
    calls: list[Call] = []
    at = 0
    for _ in range(count):
        at += draw.choice([0, 0, 1, 1, 2, 6])
        if calls and draw.random() < 0.25:
            prompt = draw.choice(calls[-6:]).prompt
        else:
            border = block_size * draw.randrange(longest // 2 // block_size)
            length = max(0, border + draw.randrange(-1, 2))
            if draw.random() < 0.1:
                length = longest
            prompt = draw.choice(stems)[:length] + _tokens(draw, draw.choice([1, 1, 2, 5]))
        size = draw.choices([1, 2, 3, 4, 5], [6, 3, 3, 2, 1])[0]
        sampling = random_sampling(draw)
        apart = draw.choice([0, 1, 1, 2, 5, 20])
        calls.append(
            Call(
                prompt,
                tuple(_with_own_seed(sampling, index) for index in range(size)),
                tuple(at + draw.randint(0, apart) for _ in range(size)),
                at + draw.randrange(30) if draw.random() < 0.12 else None,
                draw.choice([0, 0, 0, 0, 1, -1, 1000]),
                draw.choice(["", "", "", "salt"]),
            )
        )
    return calls


def random_sampling(draw: random.Random) -> SamplingParams:
    """Sampling parameters of one call, with any of the constraints or with a grammar."""
    fields: dict[str, Any] = {"max_tokens": draw.randrange(1, 30), "temperature": 0.0}
    if draw.random() < 0.5:
        fields |= {"temperature": draw.uniform(0.4, 1.4), "seed": draw.randrange(1 << 30)}
    for constrain in draw.sample(CONSTRAINTS, draw.choice([0, 0, 0, 1, 1, 2, 3])):
        fields |= constrain(draw)
    if draw.random() < 0.12:
        fields.pop("allowed_token_ids", None)
        return SamplingParams(**fields, grammar=draw.choice(GRAMMARS))
    fields["ignore_eos"] = draw.random() < 0.4
    fields["min_tokens"] = draw.choice([0, 0, 0, min(8, fields["max_tokens"])])
    return SamplingParams(**fields)


class Traffic:
    """Sends calls to a core, step by step, and collects the answers.

    Args:
        core: the core; it has no other user.
        tokenizer: the model's.
    """

    def __init__(self, core: EngineCore | DataParallelCore, tokenizer: Tokenizer) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._live: dict[str, tuple[Answer, TextOutputProcessor]] = {}
        self._free_ids: list[str] = []
        self._num_ids = 0

    def send(self, calls: Sequence[Call]) -> list[list[Answer]]:
        """Send calls, each choice at its step; returns the answers once all have ended."""
        answers = [[Answer() for _ in call.sampling] for call in calls]
        names: dict[int, dict[int, str]] = {number: {} for number in range(len(calls))}
        todo = sorted(_events(calls), key=lambda event: event[0], reverse=True)
        step = 0
        while todo or self._live:
            step = step + 1 if self._live or not todo else todo[-1][0]
            while todo and todo[-1][0] <= step:
                _, number, index = todo.pop()
                if index is None:
                    self._leave(answers[number], names[number])
                elif not (answer := answers[number][index]).end:
                    names[number][index] = self._add(calls[number], number, index, answer)
            self.step()
        return answers

    def step(self) -> None:
        """Run a step, and check the core's block accounting."""
        for update in self._core.step():
            if update.request_id in self._live:
                self._take(*self._live[update.request_id], update)
        self._core.check_integrity()

    def _add(self, call: Call, number: int, index: int, answer: Answer) -> str:
        sampling = call.sampling[index]
        if self._free_ids:
            name = self._free_ids.pop()
        else:
            name, self._num_ids = f"r{self._num_ids}", self._num_ids + 1
        self._live[name] = answer, TextOutputProcessor(self._tokenizer, sampling)
        request = EngineRequest(
            name,
            call.prompt,
            sampling,
            priority=call.priority,
            group=f"call {number}" if len(call.sampling) > 1 else None,
            cache_salt=call.cache_salt,
        )
        self._core.post(AddRequest(request))
        return name

    def _leave(self, answers: Sequence[Answer], names: dict[int, str]) -> None:
        for index, answer in enumerate(answers):
            if index not in names:
                answer.end = FinishReason.ABORT, None  # its client has left before it arrived
            elif answer.end is None:
                self._core.post(AbortRequest(names[index]))

    def _take(self, answer: Answer, text: TextOutputProcessor, update: TokenUpdate) -> None:
        is_over = update.finish is not None
        if is_over:  # the id is free again
            del self._live[update.request_id]
            self._free_ids.append(update.request_id)
        if answer.end is not None:  # a stop string has ended it, which the core learns by an abort
            return
        try:
            found = text.advance(update)
        except RequestFailed as exc:
            answer.end = f"{type(exc).__name__}: {exc}"
            return
        answer.token_ids += found.token_ids
        answer.text += found.text
        answer.logprobs += found.logprobs
        answer.prompt_logprobs += found.prompt_logprobs
        if found.finish is not None:
            answer.end = found.finish, found.stop_reason
            if not is_over:
                self._core.post(AbortRequest(update.request_id))


class Alone:
    """Answers calls one by one, with an engine that does nothing else; remembers the answers."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._known: dict[tuple[tuple[int, ...], SamplingParams], Answer] = {}

    def answer(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer:
        """The answer of one choice."""
        if (prompt, sampling) not in self._known:
            call = Call(prompt, (sampling,), (0,), None, 0, "")
            [[self._known[prompt, sampling]]] = self._traffic.send([call])
        return self._known[prompt, sampling]


@contextmanager
def core_of(model: Path, **options: Any) -> Iterator[EngineCore | DataParallelCore]:
    """A core in this process; ``options`` are fields of ``EngineConfig``."""
    options = {"dtype": "float32", "threads": 1, **options}
    if (pool := options.get("kv_pool")) is not None:
        options["kv_pool"] = read_kv_pool(pool)
    core = build_engine(EngineConfig(model, **options)).core
    try:
        yield core
    finally:
        core.close()


def differences(calls: Sequence[Call], answers: Sequence[list[Answer]], alone: Alone) -> list[str]:
    """What is wrong with the answers, one line per choice."""
    found = []
    for number, (call, choices) in enumerate(zip(calls, answers, strict=True)):
        for index, (sampling, answer) in enumerate(zip(call.sampling, choices, strict=True)):
            if wrong := answer.difference(alone.answer(call.prompt, sampling)):
                found.append(f"call {number}, choice {index} of {len(choices)}: {wrong}; {call}")
    return found


def check_empty(core: EngineCore | DataParallelCore) -> None:
    """Check that nothing is left of any request: no block, no host block, no handle of a store."""
    deadline = time.monotonic() + SETTLE_S
    while left := what_is_left(core):
        assert time.monotonic() < deadline, left
        core.step()


def what_is_left(core: EngineCore | DataParallelCore) -> dict[str, float]:
    """What the core still has of requests; all of it should be gone once they have ended."""
    stats = core.report().stats
    kept: dict[str, float] = {
        name: getattr(stats, name)
        for name in ("num_running", "num_waiting", "num_swapped", "num_loading", "kv_cache_usage")
    }
    if stats.kv_pool is not None:
        kept["saves_in_flight"] = stats.kv_pool.saves_in_flight
    if (store := stats.pool_store) is not None:
        kept |= {"num_pins": store.num_pins, "num_staging": store.num_staging}
    return {name: value for name, value in kept.items() if value}


def _events(calls: Sequence[Call]) -> Iterator[tuple[int, int, int | None]]:
    """What happens when: a choice of a call arrives, or, with None, its client leaves."""
    for number, call in enumerate(calls):
        for index, step in enumerate(call.arrivals):
            yield step, number, index
        if call.leaves_at is not None:
            yield call.leaves_at, number, None


def _with_own_seed(sampling: SamplingParams, index: int) -> SamplingParams:
    seed = sampling.seed
    return sampling if seed is None else replace(sampling, seed=seed + index)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choice(VOCABULARY) for _ in range(count))


def _words(draw: random.Random) -> Iterator[tuple[int, ...]]:
    yield from ((token_id,) for token_id in draw.sample(VOCABULARY, 60))
    yield from (_tokens(draw, 2) for _ in range(60))


def _is_close(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    found = (one.logprob, *(logprob for _, logprob in one.top))
    expected = (other.logprob, *(logprob for _, logprob in other.top))
    return len(found) == len(expected) and all(
        abs(a - b) < LOGPROB_TOLERANCE or a == b for a, b in zip(found, expected, strict=True)
    )
