"""What the scheduler knows of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from mooncake_engine.messages import EngineRequest, RequestTimes, TokenLogprobs
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import FirstToken

if TYPE_CHECKING:
    from mooncake_engine.scheduling.draft_scheduling import DraftLength


class RequestStatus(Enum):
    """Where a request stands. On a decode instance it comes in by PREALLOCATING."""

    LOOKING_UP = auto()
    """Waits for what the KVCache pool has of its prompt, or for another request's load from it."""
    PREALLOCATING = auto()
    """Waits for blocks to load a peer's KV into."""
    TRANSFERRING = auto()
    """Has them; the load is under way."""
    WAITING = auto()
    """Waits for its turn; owns blocks if its KV was loaded."""
    RUNNING = auto()
    """Takes part in steps."""
    SWAPPED = auto()
    """Preempted; its KV is in host memory."""
    FINISHED = auto()


_HAS_PROMPT_SOON = (RequestStatus.RUNNING, RequestStatus.LOOKING_UP, RequestStatus.TRANSFERRING)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """Live requests with one prompt (``n`` or ``best_of``); a single request is a group of one.

    They share the prompt's blocks, have one priority, and are preempted together.

    Args:
        priority_key: sort key: smaller runs sooner, larger is preempted sooner.
        members: in the order in which they came.
    """

    priority_key: tuple[int, float, int]
    members: list[Request] = field(default_factory=list)

    def find_prompt(self) -> Request | None:
        """A member whose blocks hold the whole prompt's KV, or None.

        One that is still catching up does not count: it has blocks beyond those that it writes
        next, and only a table's last block is ever copied on write. One with drafts in flight has
        such blocks, too, but never a shared one to write to: whoever forks it copies at once, or
        asks ``BlockManager.may_share_later``. Nor does one count whose KV may turn out wrong: a
        preempted one loads its answer with its prompt.
        """
        for member in self.members:
            has_prompt = member.num_computed >= member.num_prompt_tokens
            is_right = not (member.is_unproven or member.has_wrong_kv)
            if member.block_ids and has_prompt and is_right and member.num_pending <= 1:
                return member
        return None

    def find_leader(self, request: Request) -> Request | None:
        """A member that is computing the prompt, loads it from the KVCache pool, or has reserved
        blocks for it, and has no token yet: ``request`` may begin with what comes of that."""
        if not request.shares_first_token:
            return None
        for member in self.members:
            is_reserving = member.loads_kv and member.state is RequestStatus.PREALLOCATING
            if (is_reserving or member.state in _HAS_PROMPT_SOON) and member.shares_first_token:
                return member
        return None

    @property
    def is_unproven(self) -> bool:
        """Whether steps run a member although its load from the KVCache pool has not ended: what
        writes to its blocks can't be waited for."""
        return any(member.is_unproven for member in self.members)

    def holders(self) -> list[Request]:
        """Members that own blocks and would have to give them up together."""
        states = (RequestStatus.RUNNING, RequestStatus.WAITING)
        return [member for member in self.members if member.block_ids and member.state in states]


@dataclass(slots=True, eq=False)
class Request:
    """A live request: its tokens, its blocks, and how far it has come.

    Args:
        spec: what was asked for.
        seed: resolved seed.
        arrival: clock reading at which it came, in seconds.

    Attributes:
        request_id: the engine's key.
        sampling: how its tokens are chosen.
        num_prompt_tokens: length of the prompt.
        group: its own or its siblings'; set when it comes to the scheduler.
        leader: the sibling whose prompt is on its way and will be this one's, too.
        max_num_tokens: it ends when it is that long; set when it comes to the scheduler.
        min_num_tokens: it ends with one of ``stop_token_ids`` when it is that long; set then, too.
        stop_token_ids: its own and, unless it ignores them, the model's.
        num_computed: tokens whose KV is there.
        num_preemptions: how often it has lost its blocks.
        num_in_flight: those behind them whose KV will be, once the steps in flight are over.
        num_output_placeholders: tokens that these steps sample, not yet known to the scheduler.
        num_unverified_drafts: what these steps draft at most: so many tokens more will be there
            once they are over, with their KV, if all are accepted.
        host_block_ids: its block table in host memory while it is swapped out.
        chain: digests of its full blocks, as far as they were needed.
        changed_at: from where on the workers don't have its block table as it is; None if they do.
        awaits_copies: whether its blocks were swapped in, and may still be on their way.
        draft_length: how many draft tokens it gets; None before the first.
        chunk_chain: keys of its full chunks, as far as they were needed.
        num_offered: tokens whose chunks the pool was offered.
        num_saved: those of these that it has taken: the others are offered again with the next.
        num_received: prompt tokens whose KV came from a peer, which offers their chunks to the
            pool, too.
        pool_load: name of its load from the pool; None if none is under way.
        is_unproven: steps run it although that load has not ended.
        has_wrong_kv: they did, and it has failed: it starts over when no step in flight runs it.
    """

    spec: EngineRequest
    seed: int
    arrival: float
    state: RequestStatus = RequestStatus.WAITING
    request_id: str = field(init=False)
    sampling: SamplingParams = field(init=False)
    num_prompt_tokens: int = field(init=False)
    group: SequenceGroup = field(init=False)
    leader: Request | None = None
    max_num_tokens: int = field(init=False)
    min_num_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    token_ids: list[int] = field(init=False)
    block_ids: list[int] = field(default_factory=list)
    host_block_ids: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0
    num_output_placeholders: int = 0
    num_unverified_drafts: int = 0
    num_published: int = 0
    changed_at: int | None = None
    awaits_copies: bool = False
    num_cached_tokens: int = 0
    num_scored: int = 0
    draft_length: DraftLength | None = None
    chunk_chain: list[bytes] = field(default_factory=list)
    num_offered: int = 0
    num_saved: int = 0
    num_received: int = 0
    pool_load: str | None = None
    is_unproven: bool = False
    has_wrong_kv: bool = False
    last_logprobs: TokenLogprobs | None = None
    deadline: float | None = None
    load_started: float | None = None
    loaded: float | None = None
    scheduled: float | None = None

    def __post_init__(self) -> None:
        self.request_id, self.sampling = self.spec.request_id, self.spec.sampling
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.first_token is not None:
            self.token_ids.append(self.first_token.token_id)
            self.num_cached_tokens = self.first_token.num_cached_tokens

    @property
    def expiry(self) -> float | None:
        """When its time is up; None if there is no deadline."""
        return None if self.spec.timeout_s is None else self.arrival + self.spec.timeout_s

    @property
    def times(self) -> RequestTimes:
        """How it has come on."""
        return RequestTimes(self.arrival, self.load_started, self.loaded, self.scheduled)

    @property
    def first_token(self) -> FirstToken | None:
        """Of a peer that holds the prompt's KV; None without such a peer, and where it is sampled
        here, from that KV."""
        return self.spec.kv_transfer_params.first_token

    @property
    def keeps_kv(self) -> bool:
        """Whether it ends after its first token, and its KV is kept for a peer."""
        return self.spec.kv_transfer_params.keeps_kv

    @property
    def sends_kv(self) -> bool:
        """Whether its KV goes to a peer as it is computed, written there or read from here; implies
        ``keeps_kv``."""
        return self.spec.kv_transfer_params.target is not None

    @property
    def loads_kv(self) -> bool:
        """Whether the prompt's KV comes from a peer, with or after its first token."""
        return self.spec.kv_transfer_params.loads_kv

    @property
    def has_verified_kv(self) -> bool:
        """Whether its KV is certainly that of its tokens, so that other requests may have it: a
        peer that does not say what it was given is believed for this request alone."""
        return self.spec.kv_transfer_params.is_verified

    @property
    def num_tokens(self) -> int:
        """Tokens so far, and output placeholders: at least so many once the steps in flight are
        over."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def most_tokens(self) -> int:
        """How many there are then if all draft tokens are accepted."""
        return self.num_tokens + self.num_unverified_drafts

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled(self) -> int:
        """Tokens that have run or are about to: the position of the next one that does, or of an
        earlier one, where drafts are accepted."""
        return self.num_computed + self.num_in_flight

    @property
    def most_scheduled(self) -> int:
        """The position of the next one if all draft tokens are accepted."""
        return self.num_scheduled + self.num_unverified_drafts

    @property
    def awaits_scores(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed: a cached prefix has
        none. ``num_scored`` of them have been reported; the first token has none."""
        is_asked = self.sampling.prompt_logprobs is not None
        return is_asked and self.num_scored < self.num_prompt_tokens - 1

    @property
    def shares_prompt(self) -> bool:
        """Whether a sibling's KV of the prompt serves it as well: a peer may wait for its own, and
        log probabilities come with computing it."""
        return not self.sends_kv and not self.awaits_scores

    @property
    def shares_first_token(self) -> bool:
        """Whether it may sample its first token from the logits of a sibling's prompt."""
        return self.shares_prompt and self.num_tokens == self.num_prompt_tokens

    def share_offers(self, sibling: Request) -> None:
        """What the pool was offered of a sibling's prompt it was offered of this one's."""
        prompt = self.num_prompt_tokens
        self.num_saved = max(self.num_saved, min(sibling.num_saved, prompt))
        self.num_offered = max(self.num_offered, min(sibling.num_offered, prompt))

    @property
    def num_pending(self) -> int:
        """Tokens that no step has run yet: 1 while decoding."""
        return self.num_tokens - self.num_scheduled
