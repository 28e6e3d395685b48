"""The synchronous interface of the engine: the caller adds requests and runs the steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from types import FrameType

from mooncake_engine.admission import check_request
from mooncake_engine.assembly import RunningEngine, build_engine
from mooncake_engine.config import EngineConfig
from mooncake_engine.core_messages import AbortRequest, AddRequest, LoadProgress
from mooncake_engine.errors import EngineDead, InvalidRequest, RequestFailed
from mooncake_engine.messages import EngineInfo, EngineRequest, TokenUpdate
from mooncake_engine.process.progress_bar import ProgressBar
from mooncake_engine.sampling_defaults import (
    NO_DEFAULTS,
    SamplingDefaults,
    read_sampling_defaults,
)
from mooncake_engine.sampling_params import SamplingParams, real_number, whole_number
from mooncake_engine.text.bad_words import with_bad_words
from mooncake_engine.text.completion_output import TextOutputProcessor, TextUpdate
from mooncake_engine.text.grammars import vocabulary_of
from mooncake_engine.text.limits import check_prompt, choice_sampling
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.params import TransferMode


@dataclass(frozen=True, slots=True)
class OutputUpdate:
    """The outcome of a step for one output.

    Args:
        request_id: id with which the request was added.
        index: index of the output, among all candidates of ``best_of``.
        update: new text and tokens; with ``finish`` the output is complete.
        error: why the engine could not finish the output; set on its last update only.
    """

    request_id: str
    index: int
    update: TextUpdate
    error: RequestFailed | None = None


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the block instead of within it; that of
    a second Ctrl-C at once. Only Python's main thread gets any."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(signal.SIGINT, held.pop())


class LLMEngine:
    """Continuous batching under the caller's control: all work happens in ``step``.

    Not thread-safe; it must be the only user of its core.

    Args:
        engine: result of ``build_engine``, without a connector; ``close`` closes it.
        tokenizer: the model's tokenizer.
        defaults: the model's own sampling parameters.
    """

    def __init__(
        self,
        engine: RunningEngine,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self.default_sampling = defaults.params()
        self._core = engine.core
        self._info = engine.info
        self._tokenizer = tokenizer
        # Part of the core's request ids: the core may still end a request whose id is used again.
        self._serials = count()
        self._live: dict[str, list[str]] = {}  # the core's request ids of live outputs, by request
        self._outputs: dict[str, _LiveOutput] = {}  # by the core's request id
        self._unreported: list[TokenUpdate] = []
        self._is_closed = self._is_broken = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load a model; blocks until that is done.

        Raises:
            ConfigError, CheckpointError: the engine can't be set up as configured.
        """
        defaults = read_sampling_defaults(config)
        tokenizer, bar = Tokenizer.load(config.model, config.chat_template), ProgressBar()

        def report(progress: LoadProgress) -> None:
            bar("loading weights", progress.fraction)

        return cls(build_engine(config, report), tokenizer, defaults)

    @property
    def info(self) -> EngineInfo:
        """Static facts about the engine."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is live, so that ``step`` has work to do."""
        return bool(self._live)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Add a request, which runs in the next steps.

        Args:
            request_id: id that no live request has; the request's updates carry it.
            prompt: text or token ids.
            sampling_params: default: ``SamplingParams()``.
            priority: lower runs sooner.
            timeout_s: seconds after which the request fails; None for no limit.

        Returns:
            The prompt's token ids.

        Raises:
            InvalidRequest: the request is invalid; it was not added.
            EngineDead: the engine was closed.
        """
        self._check_open()
        if request_id in self._live:
            raise InvalidRequest(f"a request {request_id!r} is already running", param="request_id")
        ids = self._token_ids(prompt)
        check_prompt(ids, self._info, param="prompt")
        sampling = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(sampling, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(sampling).__name__}",
                param="sampling_params",
            )
        sampling = with_bad_words(sampling, self._tokenizer)
        self._check_grammar(sampling)
        is_group = sampling.num_candidates > 1
        name = f"{request_id}-{next(self._serials)}"
        common = EngineRequest(
            name,
            ids,
            sampling,
            priority=whole_number("priority", priority),
            timeout_s=timeout_s if timeout_s is None else real_number("timeout_s", timeout_s),
            group=name if is_group else None,
        )
        self._begin(request_id, [self._command(common, i) for i in range(sampling.num_candidates)])
        return ids

    def abort_request(self, request_id: str) -> None:
        """Abort a request: no more updates follow, and the next step frees its blocks. Unknown ids
        are ignored."""
        for name in list(self._live.get(request_id, ())):
            self._core.post(AbortRequest(name))
            self._forget(name)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Returns False, and drops nothing, while requests use blocks.

        Raises:
            EngineDead: the engine died, or was closed.
        """
        self._check_open()
        while not self._live and self._core.has_work:  # it has yet to end requests that ended here
            self._step()
        return self._core.reset_prefix_cache()

    def step(self) -> list[OutputUpdate]:
        """Run one step; returns the updates of outputs. Its cost depends on the batch alone, not on
        the number of waiting requests.

        Raises:
            EngineDead: the engine died, was closed, or was interrupted in the middle of a step.
            KeyboardInterrupt: Ctrl-C; the step was completed first, unless Ctrl-C came twice, and
                the next call returns its updates.
        """
        self._check_open()
        return [
            self._advance(self._outputs[update.request_id], update)
            for update in self._step()
            if update.request_id in self._outputs
        ]

    def close(self) -> None:
        """Close the core and release its resources. Idempotent."""
        self._is_closed = True
        self._core.close()

    def _step(self) -> list[TokenUpdate]:
        """Run one step of the core; returns its updates, and those of an interrupted call."""
        with _interrupts_held_back():
            try:
                self._unreported += self._core.step()
            except EngineDead:
                raise
            except BaseException:
                self._is_broken = True
                raise
        updates, self._unreported = self._unreported, []
        return updates

    def _token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return tuple(whole_number("prompt", token_id) for token_id in prompt)

    def _check_open(self) -> None:
        if self._is_closed:  # its memory has been freed: a step would end the process
            raise EngineDead("this engine is closed; create another one")
        if self._is_broken:  # scheduler and ranks may disagree on which steps have run
            raise EngineDead("a step of this engine was not completed; create another one")

    def _check_grammar(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            info = self._info
            tokens = vocabulary_of(self._tokenizer, info.vocab_size, info.eos_token_ids)
            tokens.matcher(sampling.grammar)

    def _command(self, common: EngineRequest, index: int) -> AddRequest:
        """Returns the core's command for one output."""
        num_prompt_tokens = len(common.prompt_token_ids)
        spec = replace(
            common,
            request_id=f"{common.request_id}-{index}",
            sampling=choice_sampling(common.sampling, index, num_prompt_tokens, self._info),
        )
        check_request(spec, self._info, TransferMode.NONE)
        return AddRequest(spec)

    def _begin(self, request_id: str, commands: Sequence[AddRequest]) -> None:
        self._live[request_id] = [command.request.request_id for command in commands]
        for index, command in enumerate(commands):
            text = TextOutputProcessor(self._tokenizer, command.request.sampling)
            self._outputs[command.request.request_id] = _LiveOutput(request_id, index, text)
            self._core.post(command)

    def _advance(self, output: _LiveOutput, update: TokenUpdate) -> OutputUpdate:
        try:
            text_update, error = output.text.advance(update), None
        except RequestFailed as exc:
            text_update, error = TextUpdate("", finish=update.finish), exc
        if text_update.finish is not None:
            if update.finish is None:  # ended by a stop string, which the core does not know
                self._core.post(AbortRequest(update.request_id))
            self._forget(update.request_id)
        return OutputUpdate(output.request_id, output.index, text_update, error)

    def _forget(self, name: str) -> None:
        request_id = self._outputs.pop(name).request_id
        names = self._live[request_id]
        names.remove(name)
        if not names:
            del self._live[request_id]


@dataclass(frozen=True, slots=True)
class _LiveOutput:
    """A live output: its request, its index, and its text so far."""

    request_id: str
    index: int
    text: TextOutputProcessor
