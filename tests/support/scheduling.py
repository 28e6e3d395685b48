"""A scheduler under test: requests, a peer, and workers whose KV records its tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_engine.kv_cache.block_manager import BlockManager
from mooncake_engine.messages import EngineRequest, TokenLogprobs, TokenUpdate
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.request import Request
from mooncake_engine.scheduling.scheduler import Scheduler
from mooncake_engine.scheduling.scheduler_interface import ChunkPool, SchedulerLimits
from mooncake_engine.scheduling.step_plan import (
    SampledToken,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from mooncake_kv.params import FirstToken, KVTransferParams, PrefixSource, PushTarget, RemoteKV

EOS = 2
WRONG = -1
"""A draft token that is not accepted."""


Slot = int | None
"""What a slot's KV was computed from, see ``fingerprints``; None: nothing yet."""


def token_of(request_id: str, position: int) -> int:
    """The simulated model's next token: a function of the request and the position only."""
    draw = hash((len(request_id), *request_id.encode(), position)) % 40
    return EOS if draw == 0 else 50 + draw


class Worker:
    """Blocks that record, per slot, which tokens they were computed from.

    Every step is checked: a sequence may attend only to its own tokens' KV, wherever its blocks
    have been copied, shared or swapped to.

    Args:
        num_blocks, num_host_blocks, block_size: of the pools.
        token: always sample this token instead of ``token_of``.

    Attributes:
        num_accepted: number of draft tokens of the first sequence that the next step accepts; it
            increases by one per sequence, modulo the number of its draft tokens plus one.
        copies_late: copies to and from the host are delayed until they are required.
        is_turning: KV that peers write is unusable (negative) until its block is turned once.
        failing: a request whose next sampled token is an error instead.
    """

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, token: int | None = None
    ) -> None:
        self.token = token
        self.is_turning = False
        self.copies_late = False
        self._late: deque[tuple[str, int, int]] = deque()
        self.num_accepted = 0
        self.failing: str | None = None
        self._scored: set[str] = set()
        self._block_size = block_size
        self.slots: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self._host: list[list[Slot]] = [[None] * block_size for _ in range(num_host_blocks)]
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._num_prompt: dict[str, int] = {}
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a plan as the real workers do."""
        for name in plan.removed:
            del self._tables[name], self._tokens[name]
        self._copy_late(plan.touched_blocks())
        for block in plan.received_blocks:
            self.slots[block] = [None if slot is None else -slot for slot in self.slots[block]]
        self._copy_blocks(plan)
        self._take_new(plan)
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        for sequence in plan.sequences:
            self._run(sequence)
        num_drafted = {}
        for index, sequence in enumerate(plan.sequences):
            if sequence.is_sampling:
                for name in (sequence.request_id, *sequence.siblings):
                    tokens[name] = (self._sample(name),)
            if sequence.num_draft_tokens:
                num_accepted = (self.num_accepted + index) % (sequence.num_draft_tokens + 1)
                tokens[sequence.request_id] += self._draft(sequence, num_accepted)
                num_drafted[sequence.request_id] = sequence.num_draft_tokens
        scores = {s.request_id: self._score(s) for s in plan.sequences}
        failed = {self.failing: "it failed"} if self.failing in tokens else {}
        plain_tokens = {}
        if plan.step % 2:  # both forms of a single token, in turns
            single = [name for name, sampled in tokens.items() if len(sampled) == 1]
            plain_tokens = {name: tokens.pop(name)[0].token_id for name in single}
        return StepResult(
            plan.step,
            tokens,
            prompt_logprobs={name: found for name, found in scores.items() if found},
            failed=failed,
            num_drafted=num_drafted,
            is_copying=bool(self._late),
            plain_tokens=plain_tokens,
        )

    def _take_new(self, plan: StepPlan) -> None:
        for new_request in plan.new_requests:
            self._tables[new_request.request_id] = list(new_request.block_ids)
            self._tokens[new_request.request_id] = list(new_request.token_ids)
            self._num_prompt[new_request.request_id] = new_request.num_prompt_tokens
            if new_request.sampling.prompt_logprobs is not None:
                self._scored.add(new_request.request_id)

    def _copy_blocks(self, plan: StepPlan) -> None:
        self._late += [("out", block, host) for block, host in plan.swap_outs]
        self._late += [("in", block, host) for host, block in plan.swap_ins]
        if plan.drains_copies or not self.copies_late:
            self._copy_late({block for _, block, _ in self._late})
        self._copy_late(plan.touched_blocks())
        copied = [list(self.slots[source]) for source, _ in plan.block_copies]  # all at once
        for (_, target), slots in zip(plan.block_copies, copied, strict=True):
            self.slots[target] = slots

    def _copy_late(self, touched: set[int]) -> None:
        """Make the pending copies of these blocks and all copies before them."""
        while touched & {block for _, block, _ in self._late}:
            way, block, host = self._late.popleft()
            if way == "out":
                self._host[host] = list(self.slots[block])
            else:
                self.slots[block] = list(self._host[host])

    def load(self, block_ids: Sequence[int], tokens: Sequence[int], start: int) -> None:
        """Receive a peer's KV, from token ``start`` on. The KV before it is present or will be
        written by a step in flight; the step that reads it checks it."""
        self._write(block_ids, tokens, start, is_foreign=self.is_turning)

    def check(self, block_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that the leading slots of a block table hold these tokens' KV."""
        found = [
            self.slots[block_ids[i // self._block_size]][i % self._block_size]
            for i in range(len(tokens))
        ]
        assert found == fingerprints(tokens), f"KV of other tokens in {list(block_ids)}"

    def _run(self, sequence: ScheduledSequence) -> None:
        name = sequence.request_id
        table, tokens = self._tables[name], self._tokens[name]
        at = len(table) if sequence.new_blocks_at is None else sequence.new_blocks_at
        table[at:] = sequence.new_block_ids if sequence.new_block_ids else table[at:]
        start = self._start(sequence)
        stop = start + sequence.count
        assert sequence.is_sampling == (stop == len(tokens)), "samples before the last token"
        self.check(table, tokens[:start])
        self._write(table, tokens[:stop], start)
        self.num_computed += sequence.count
        for sibling in sequence.siblings:
            assert self._tokens[sibling] == tokens, "siblings with other tokens"

    def _score(self, sequence: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        """The prompt tokens that follow those that ran, if the request asks for their scores."""
        name, start = sequence.request_id, sequence.start
        if name not in self._scored:
            return ()
        following = self._tokens[name][: self._num_prompt[name]][start + 1 :][: sequence.count]
        return tuple(TokenLogprobs(token, 0.0) for token in following)

    def _start(self, sequence: ScheduledSequence) -> int:
        """The first token to compute: after the accepted draft tokens."""
        if not sequence.num_unverified_drafts:
            return sequence.start
        start = len(self._tokens[sequence.request_id]) - sequence.count
        assert 0 <= start - sequence.start <= sequence.num_unverified_drafts, "starts elsewhere"
        return start

    def _draft(self, sequence: ScheduledSequence, num_right: int) -> tuple[SampledToken, ...]:
        """Verify draft tokens after the token just sampled, of which the first ``num_right`` are
        right; returns the tokens sampled after those."""
        name = sequence.request_id
        stop = len(self._tokens[name]) - 1  # the last token was sampled after those that have run
        sampled = tuple([self._sample(name) for _ in range(num_right)])
        right = self._tokens[name][: stop + num_right]
        wrong = [WRONG] * (sequence.num_draft_tokens - num_right)
        self._write(self._tables[name], [*right, *wrong], stop)
        self.num_computed += sequence.num_draft_tokens
        return sampled

    def _write(
        self, table: Sequence[int], tokens: Sequence[int], start: int, is_foreign: bool = False
    ) -> None:
        values = fingerprints(tokens)
        for position in range(start, len(tokens)):
            block, offset = table[position // self._block_size], position % self._block_size
            value = values[position]
            self.slots[block][offset] = -value if is_foreign else value

    def _sample(self, name: str) -> SampledToken:
        tokens = self._tokens[name]
        position = len(tokens) - self._num_prompt[name]
        tokens.append(token_of(name, position) if self.token is None else self.token)
        return SampledToken(tokens[-1])


def fingerprints(tokens: Sequence[int]) -> list[int]:
    """Per position, a positive number that identifies all tokens up to it."""
    result: list[int] = []
    last = 0
    for token in tokens:
        last = abs(hash((last, token))) + 1
        result.append(last)
    return result


OnLoad = Callable[[list[int], tuple[int, ...], int], None]


class RecordingConnector:
    """Records the scheduler's calls, and checks that a connector can serve them; the test plays the
    peer.

    Args:
        on_load: called at the start of a load with its block table, prompt and first token.

    Attributes:
        lost: requests whose lease was lost before their load; ``handle_load_ended`` follows.
    """

    def __init__(self, on_load: OnLoad | None = None) -> None:
        self._on_load = on_load
        self.announced: set[str] = set()
        self.offered: dict[str, list[int]] = {}
        self.withdrawn: list[str] = []
        self.advanced: dict[str, list[tuple[int, int, list[int]]]] = {}
        self.expected: set[str] = set()
        self.loading: dict[str, int] = {}
        self.tables: dict[str, tuple[list[int], tuple[int, ...]]] = {}
        self.cancelled: set[str] = set()
        self.lost: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        (self.announced if request.sends_kv else self.expected).add(request.request_id)

    def request_finished(self, request: Request, block_ids: list[int]) -> dict[str, Any] | None:
        self.offered[request.request_id] = list(block_ids)
        if request.sends_kv:
            return None
        return {"do_remote_prefill": True, "remote_request_id": request.request_id}

    def prefill_advanced(self, request: Request) -> None:
        progress = (request.num_preemptions, request.num_computed, list(request.block_ids))
        self.advanced.setdefault(request.request_id, []).append(progress)

    def cancel_send(self, request_id: str) -> None:
        self.withdrawn.append(request_id)

    def start_load_kv(self, request: Request) -> None:
        name, first_token = request.request_id, request.num_computed
        assert name in self.expected, f"{name} was not announced, or its load was cancelled"
        self.expected.remove(name)
        if name in self.lost:
            return
        self.loading[request.request_id] = first_token
        table, prompt = list(request.block_ids), request.spec.prompt_token_ids
        self.tables[request.request_id] = (table, prompt)
        if self._on_load is not None:
            self._on_load(table, prompt, first_token)

    def cancel_load(self, request_id: str) -> None:
        self.cancelled.add(request_id)
        self.expected.discard(request_id)


class Bench:
    """A scheduler with its peer and its workers.

    Args:
        num_blocks: size of the pool.
        num_host_blocks: size of the swap space.
        block_size: tokens per block.
        token: see ``Worker``.
        depth: number of steps that may be in flight. Each step runs as late as possible.
        pool: the KVCache pool, if there is one.
        limits: non-default fields of ``SchedulerLimits``.
    """

    worker_type = Worker

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        num_host_blocks: int = 0,
        block_size: int = 4,
        prefix_caching: bool = True,
        token: int | None = 7,
        depth: int = 1,
        pool: ChunkPool | None = None,
        **limits: Any,
    ) -> None:
        wanted = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": num_blocks * block_size,
            "eos_token_ids": frozenset({EOS}),
            **limits,
        }
        blocks = BlockManager(
            num_blocks, block_size, prefix_caching=prefix_caching, num_host_blocks=num_host_blocks
        )
        self.worker = self.worker_type(num_blocks, num_host_blocks, block_size, token)
        self.worker.is_turning = bool(limits.get("reports_received_blocks"))
        self.connector = RecordingConnector(self._begin_load if self.worker.is_turning else None)
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.scheduler = Scheduler(SchedulerLimits(**wanted), blocks, self.connector, pool)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return self.scheduler.blocks.pool.num_free

    def add(self, name: str, prompt: Sequence[int], **options: Any) -> Request:
        """Add a request; see ``make_request``."""
        request = make_request(name, prompt, **options)
        self.scheduler.add(request)
        return request

    def step(self) -> tuple[StepPlan, list[TokenUpdate]]:
        """Schedule one step, run the oldest one if ``depth`` steps are in flight, and audit the
        block accounting."""
        plan = self.submit()
        is_full = len(self.in_flight) >= self.depth or plan.is_empty
        updates = self.land() if self.in_flight and is_full else self.scheduler.take_updates()
        self.scheduler.check_integrity()
        return plan, updates

    def submit(self) -> StepPlan:
        """Schedule one step; as in a core, an empty step is not run."""
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.in_flight.append(plan)
        return plan

    def land(self) -> list[TokenUpdate]:
        """Run the oldest step in flight and process its result."""
        plan = self.in_flight.popleft()
        return self.scheduler.update(plan, self.worker.execute(plan))

    def run(self, max_steps: int = 500) -> dict[str, list[int]]:
        """Step until all requests have finished; returns every request's tokens."""
        answers: dict[str, list[int]] = {}
        for _ in range(max_steps):
            for update in self.step()[1]:
                answers.setdefault(update.request_id, []).extend(update.token_ids)
            if not self.scheduler.has_work:
                return answers
        raise AssertionError(f"not done after {max_steps} steps: {answers}")

    def _begin_load(self, table: list[int], prompt: tuple[int, ...], start: int) -> None:
        """Write half of the load at once: a peer may write before pending steps run."""
        self.worker.load(table, prompt[: (start + len(prompt)) // 2], start)

    def end_load(self, name: str, error: str | None, first_token: FirstToken | None = None) -> None:
        """The peer's KV has arrived, or the load has failed."""
        start = self.connector.loading.pop(name)
        block_ids, prompt = self.connector.tables.pop(name)
        if error is None:
            middle = (start + len(prompt)) // 2 if self.worker.is_turning else start
            self.worker.load(block_ids, prompt, middle)
        self.scheduler.handle_load_ended(name, error, first_token=first_token)


def make_request(
    name: str,
    prompt: Sequence[int],
    *,
    arrival: float = 0.0,
    max_tokens: int = 8,
    first_token: int | None = None,
    group: str | None = None,
    priority: int = 0,
    prefix_sources: tuple[PrefixSource, ...] = (),
    timeout_s: float | None = None,
    **kind: bool,
) -> Request:
    """Create a request.

    Args:
        name, prompt, arrival, max_tokens, group, priority, prefix_sources, timeout_s: as its
            fields.
        first_token: sampled by a peer that holds the prompt's KV.
        kind: ``keeps_kv``, ``sends_kv`` (implies it), ``receives_kv``, or ``pulls_kv`` from a peer
            whose first token is not used; ``is_unverified`` if that peer does not say of which
            prompt its KV is; ``is_scored`` if it asks for its prompt's log probabilities.
    """
    prompt_logprobs = 0 if kind.get("is_scored") else None
    sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    remote = RemoteKV("peer", name, "127.0.0.1", 1, (), len(prompt))
    params = KVTransferParams(
        keeps_kv=kind.get("keeps_kv", False) or kind.get("sends_kv", False),
        remote=remote if first_token is not None or kind.get("pulls_kv") else None,
        first_token=None if first_token is None else FirstToken(first_token),
        target=PushTarget(remote, 0) if kind.get("sends_kv") else None,
        metaserver="http://proxy" if kind.get("receives_kv") else None,
        prefix_sources=prefix_sources,
        is_verified=not kind.get("is_unverified", False),
    )
    spec = EngineRequest(
        name, tuple(prompt), sampling, params, priority, group=group, timeout_s=timeout_s
    )
    return Request(spec, 0, arrival)
