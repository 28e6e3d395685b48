"""The scheduler's state of one request, and of the group of requests that share its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from mooncake_engine.messages import EngineRequest, RequestTimes, TokenLogprobs
from mooncake_engine.sampling_params import SamplingParams
from mooncake_kv.params import FirstToken

if TYPE_CHECKING:
    from mooncake_engine.kv_cache.block_manager import CachedInUse
    from mooncake_engine.scheduling.draft_scheduling import DraftLength


class RequestStatus(Enum):
    """The status of a request. One that loads a peer's KV starts in PREALLOCATING."""

    LOOKING_UP = auto()
    """Waits for a lookup of its prompt in the KVCache pool, or for another request's load from it.
    """
    PREALLOCATING = auto()
    """Waits for free blocks to load a peer's KV into."""
    TRANSFERRING = auto()
    """Owns blocks, and KV is being loaded into them, from a peer or from the KVCache pool."""
    WAITING = auto()
    """Waits for its turn; owns blocks if its KV was loaded or swapped in."""
    RUNNING = auto()
    """Is scheduled in steps."""
    SWAPPED = auto()
    """Preempted; its KV is in host memory."""
    FINISHED = auto()


_HAS_PROMPT_SOON = (RequestStatus.RUNNING, RequestStatus.LOOKING_UP, RequestStatus.TRANSFERRING)


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The live requests of one prompt (``n`` or ``best_of``); a single request is a group of one.

    Members share the prompt's blocks, have one priority, and are preempted together.

    Args:
        priority_key: sort key; smaller runs sooner, larger is preempted sooner.
        members: live requests, in order of arrival.
    """

    priority_key: tuple[int, float, int]
    members: list[Request] = field(default_factory=list)

    def find_prompt(self) -> Request | None:
        """Returns a member whose blocks hold the KV of the whole prompt, or None.

        A member that is still catching up does not qualify: it owns blocks behind the one that it
        writes next, and only the last block of a table is ever copied on write. A member with draft
        tokens in flight owns such blocks, too, but never writes to a shared one: a caller that
        forks it copies at once, or checks ``BlockManager.may_share_later``. A member whose KV may
        turn out to be wrong does not qualify either: after a preemption, its load covers output
        tokens as well as the prompt.
        """
        for member in self.members:
            has_prompt = member.num_computed >= member.num_prompt_tokens
            is_right = not (member.is_unproven or member.has_wrong_kv)
            if member.block_ids and has_prompt and is_right and member.num_pending <= 1:
                return member
        return None

    def find_leader(self, request: Request) -> Request | None:
        """Returns a member that will have the prompt's KV soon, or None: ``request`` may wait for
        that KV. The member computes the prompt, loads it from a peer or the KVCache pool, or waits
        for blocks to load it into; it has no output token yet."""
        if not request.shares_first_token:
            return None
        for member in self.members:
            is_reserving = member.loads_kv and member.status is RequestStatus.PREALLOCATING
            if (is_reserving or member.status in _HAS_PROMPT_SOON) and member.shares_first_token:
                return member
        return None

    @property
    def is_unproven(self) -> bool:
        """Whether steps run a member whose load from the KVCache pool has not completed. Such a
        member can't be preempted: the load still writes to its blocks."""
        return any(member.is_unproven for member in self.members)

    def holders(self) -> list[Request]:
        """Returns the members that own blocks and are preempted together."""
        states = (RequestStatus.RUNNING, RequestStatus.WAITING)
        return [member for member in self.members if member.block_ids and member.status in states]


@dataclass(slots=True, eq=False)
class Request:
    """A live request: its tokens, its blocks, and its progress. The scheduler's parts share and
    mutate it.

    Args:
        spec: the request as the engine received it.
        seed: resolved sampling seed.
        arrival: clock reading at arrival, in seconds.

    Attributes:
        status: which queue it is in.
        request_id: the engine's key.
        sampling: the sampling parameters.
        num_prompt_tokens: length of the prompt, and of output that other instances have generated.
        group: the group that it shares with its siblings; set when the scheduler adds the request.
        leader: the sibling whose prompt KV it waits for; None if it waits for none.
        max_num_tokens: total length at which it ends; set when the scheduler adds the request.
        min_num_tokens: total length from which a stop token ends it; set at the same time.
        stop_token_ids: its own stop tokens and, unless it ignores them, the model's.
        token_ids: the prompt, and the tokens that were sampled or accepted so far.
        block_ids: its block table.
        num_computed: tokens whose KV is computed or loaded.
        num_preemptions: how often it was preempted.
        num_in_flight: tokens behind ``num_computed`` whose KV the steps in flight compute.
        num_output_placeholders: tokens that the steps in flight sample, which the scheduler does
            not know yet.
        num_unverified_drafts: draft tokens that the steps in flight may run, at most; if all are
            accepted, the request gains that many more tokens, with their KV.
        host_block_ids: its block table in host memory while it is swapped out.
        block_hashes: digests of its full blocks, as far as they were needed.
        cached_in_use: what is known of its cached prefix while it does not fit; None if nothing.
        num_published: number of its first blocks that are full and in the prefix cache.
        num_cached_tokens: prompt tokens that were cached, here or at the prefill instance.
        prompt_hits: prompt tokens that it did not compute, by key of ``PROMPT_TOKEN_SOURCES``.
        num_scored: prompt tokens whose log probabilities were reported.
        changed_at: index from which the workers' copy of its block table is stale; None if the
            copy is current.
        awaits_copies: whether its blocks were swapped in and the copies may not be complete.
        draft_length: adapts how many draft tokens it gets; None before the first draft.
        chunk_keys: keys of its full chunks, as far as they were needed.
        num_offered: tokens whose chunks have been offered to the KVCache pool.
        num_saved: offered tokens whose chunks the pool has accepted; the rest is offered again
            with the next chunk.
        num_received: prompt tokens whose KV came from a peer; the peer offers their chunks to the
            pool, too.
        pool_load: id of its load from the pool; None if none is in flight.
        is_unproven: whether steps run it although that load has not completed.
        has_wrong_kv: whether that load failed after steps ran the request; it is recomputed once no
            step in flight runs it.
        last_logprobs: log probabilities of its last token, if it asked for them.
        deadline: clock reading at which its wait for a peer's KV, or for the pool's look-up or
            load, is given up.
        load_started_at, loaded_at, scheduled_at, has_peer_token: see ``RequestTimes``.
    """

    spec: EngineRequest
    seed: int
    arrival: float
    status: RequestStatus = RequestStatus.WAITING
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
    block_hashes: list[bytes] = field(default_factory=list)
    cached_in_use: CachedInUse | None = None
    num_computed: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0
    num_output_placeholders: int = 0
    num_unverified_drafts: int = 0
    num_published: int = 0
    changed_at: int | None = None
    awaits_copies: bool = False
    num_cached_tokens: int = 0
    prompt_hits: dict[str, int] = field(default_factory=dict)
    num_scored: int = 0
    draft_length: DraftLength | None = None
    chunk_keys: list[bytes] = field(default_factory=list)
    num_offered: int = 0
    num_saved: int = 0
    num_received: int = 0
    pool_load: str | None = None
    is_unproven: bool = False
    has_wrong_kv: bool = False
    last_logprobs: TokenLogprobs | None = None
    deadline: float | None = None
    load_started_at: float | None = None
    loaded_at: float | None = None
    scheduled_at: float | None = None
    has_peer_token: bool = False

    def __post_init__(self) -> None:
        self.request_id, self.sampling = self.spec.request_id, self.spec.sampling
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        if self.first_token is not None:
            self.token_ids.append(self.first_token.token_id)
            self.num_cached_tokens = self.first_token.num_cached_tokens
            self.has_peer_token = True

    @property
    def expiry(self) -> float | None:
        """Clock reading at which it times out; None if it has no timeout."""
        return None if self.spec.timeout_s is None else self.arrival + self.spec.timeout_s

    @property
    def times(self) -> RequestTimes:
        """Clock readings of its milestones so far, and its preemptions."""
        return RequestTimes(
            self.arrival,
            self.load_started_at,
            self.loaded_at,
            self.scheduled_at,
            self.num_preemptions,
            self.has_peer_token,
        )

    @property
    def first_token(self) -> FirstToken | None:
        """The first output token, from the peer that holds the prompt's KV. None if there is no
        such peer, or if this instance samples the first token itself, from the loaded KV."""
        return self.spec.kv_transfer_params.first_token

    @property
    def keeps_kv(self) -> bool:
        """Whether it ends after its first token and its KV is kept for a peer."""
        return self.spec.kv_transfer_params.keeps_kv

    @property
    def sends_kv(self) -> bool:
        """Whether a peer gets its KV while it is being computed, by push or by early pull; implies
        ``keeps_kv``."""
        return self.spec.kv_transfer_params.target is not None

    @property
    def loads_kv(self) -> bool:
        """Whether the prompt's KV comes from a peer, with or without the first token."""
        return self.spec.kv_transfer_params.loads_kv

    @property
    def has_verified_kv(self) -> bool:
        """Whether its KV is known to belong to its tokens, so that other requests may share it. A
        peer that does not say which prompt it computed is trusted for this request only."""
        return self.spec.kv_transfer_params.is_verified

    @property
    def num_tokens(self) -> int:
        """Tokens and output placeholders: a lower bound of its length once the steps in flight
        have completed."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_tokens_with_drafts(self) -> int:
        """Its length once the steps in flight have completed, if all draft tokens are accepted."""
        return self.num_tokens + self.num_unverified_drafts

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_scheduled(self) -> int:
        """Tokens that have run or that steps in flight run: the position of the next token to run,
        or a lower bound of it if draft tokens are in flight."""
        return self.num_computed + self.num_in_flight

    @property
    def num_scheduled_with_drafts(self) -> int:
        """The position of the next token to run if all draft tokens are accepted."""
        return self.num_scheduled + self.num_unverified_drafts

    @property
    def awaits_scores(self) -> bool:
        """Whether log probabilities of the prompt are still missing, so that a cached prefix can't
        be used. ``num_scored`` of them have been reported; the first prompt token has none."""
        is_asked = self.sampling.prompt_logprobs is not None
        return is_asked and self.num_scored < self.num_prompt_tokens - 1

    @property
    def shares_prompt(self) -> bool:
        """Whether it may use a sibling's KV of the prompt. It must not if a peer waits for its own
        KV, or if it needs log probabilities, which only computing the prompt yields."""
        return not self.sends_kv and not self.awaits_scores

    @property
    def shares_first_token(self) -> bool:
        """Whether it may sample its first token from the logits of a sibling's prompt."""
        return self.shares_prompt and self.num_tokens == self.num_prompt_tokens

    def note_cached(self, num_tokens: int) -> None:
        """Record how many prompt tokens were cached when it was first scheduled. When it starts
        over, that is what it or a sibling has computed before; only after a load that failed under
        its first steps, what was recorded was wrong. A peer's first token comes with its own
        number."""
        is_first = self.scheduled_at is None or not self.num_preemptions
        if is_first and not self.num_output_tokens:
            self.num_cached_tokens = num_tokens

    def share_offers(self, sibling: Request) -> None:
        """Count the prompt's chunks as offered and saved as far as the sibling's have been."""
        prompt = self.num_prompt_tokens
        self.num_saved = max(self.num_saved, min(sibling.num_saved, prompt))
        self.num_offered = max(self.num_offered, min(sibling.num_offered, prompt))

    @property
    def num_pending(self) -> int:
        """Tokens that no step has been scheduled to run; 1 while decoding."""
        return self.num_tokens - self.num_scheduled
