"""The scheduler's queues of live requests, and the moves between them."""

from __future__ import annotations

import heapq
from bisect import insort_right
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from mooncake_engine.messages import LOCAL_COMPUTE, PROMPT_TOKEN_SOURCES
from mooncake_engine.scheduling.request import Request, RequestStatus, SequenceGroup


def priority_key(request: Request) -> tuple[int, float, int]:
    """Sort key: smaller runs sooner, larger is preempted sooner."""
    return request.group.priority_key


MIN_STALE_ENTRIES = 64
"""Up to this many stale heap entries, of requests that have left, a queue is not rebuilt."""


class RequestQueue:
    """A priority queue of requests; a request has the same key each time it queues.

    A request may leave from anywhere in the queue. Its heap entry is then stale, and the heap is
    rebuilt before stale entries outnumber the members: else they would pile up behind a head that
    stays, for example when clients abort and retry while nothing runs.

    Args:
        key: sort key; the smallest is at the head.
    """

    def __init__(self, key: Callable[[Request], Any] = priority_key) -> None:
        self._key = key
        self._heap: list[tuple[Any, int, Request]] = []
        self._members: dict[str, Request] = {}
        self._ties = count()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        """Add a request."""
        heapq.heappush(self._heap, (self._key(request), next(self._ties), request))
        self._members[request.request_id] = request

    def peek(self) -> Request | None:
        """Returns the request with the smallest key, or None."""
        while self._heap:
            request = self._heap[0][2]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """Yields the members, smallest key first, but not those that leave during the iteration."""
        # A request that has left and come back has two heap entries.
        heap, seen = self._heap.copy(), set[str]()
        while heap:
            request = heapq.heappop(heap)[2]
            if request in self and request.request_id not in seen:
                seen.add(request.request_id)
                yield request

    def remove(self, request: Request) -> None:
        """Remove a member, wherever it is in the queue."""
        del self._members[request.request_id]
        num_stale = len(self._heap) - len(self._members)
        if num_stale > max(len(self._members), MIN_STALE_ENTRIES):
            is_member = self._members.get
            self._heap = [e for e in self._heap if is_member(e[2].request_id) is e[2]]
            heapq.heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def lowest_priority(self) -> Request | None:
        """Returns the request to preempt first, or None."""
        return max(self._members.values(), key=priority_key, default=None)


class RequestQueues:
    """All queues of one scheduler, and the moves between them. Each live request is in exactly one.

    Attributes:
        requests: all live requests, by id.
        running: requests that steps run, the most urgent first.
        waiting: requests that own no blocks and wait for their turn.
        ready: requests whose KV was loaded or swapped in, with blocks; they go before ``waiting``.
        swapped: preempted requests whose KV is in host memory.
        looking_up: requests that wait for a lookup in the KVCache pool, or for another's load.
        preallocating: requests that wait for free blocks to load a peer's KV into.
        transferring: requests whose KV is being loaded into their blocks, by id.
        following: requests that wait for a sibling's prompt, by id.
        removed: ids that the workers have yet to be told to forget.
        now: start of the current step, in seconds; moves are stamped with it.
        prompt_tokens_by_source: counts the prompt tokens of the requests that have begun to run.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = RequestQueue()
        self.ready = RequestQueue()
        self.swapped = RequestQueue()
        self.looking_up = RequestQueue()
        self.preallocating = RequestQueue()
        self.transferring: dict[str, Request] = {}
        self.following: dict[str, Request] = {}
        self.removed: list[str] = []
        self.now = 0.0
        self.prompt_tokens_by_source = dict.fromkeys(PROMPT_TOKEN_SOURCES, 0)
        self._queue_of: dict[str, RequestQueue] = {}
        self._groups: dict[str, SequenceGroup] = {}
        self._known: set[str] = set()
        self._order = count()

    @property
    def num_holders(self) -> int:
        """Number of requests that own blocks and may need one more: those that run, are ready, or
        load."""
        return len(self.running) + len(self.ready) + len(self.transferring)

    def add(self, request: Request) -> None:
        """Register a new request and add it to its group; it is in no queue yet."""
        self.requests[request.request_id] = request
        name = request.spec.group
        group = None if name is None else self._groups.get(name)
        if group is None:
            key = (request.spec.priority, request.arrival, next(self._order))
            group = SequenceGroup(key)
            if name is not None:
                self._groups[name] = group
        prompt = request.spec.prompt_token_ids
        for member in group.members[:1]:
            other = member.spec.prompt_token_ids
            is_same = other is prompt or other == prompt  # it is, where they came in one request
            assert is_same, f"group {name!r} answers two different prompts"
        group.members.append(request)
        request.group = group

    def finish(self, request: Request) -> None:
        """Unregister a finished request, which has left its queue already."""
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        group = request.group
        group.members.remove(request)
        if not group.members and request.spec.group is not None:
            del self._groups[request.spec.group]
        self.forget(request)

    def wait(self, request: Request) -> None:
        """Move a request to ``ready`` if it owns blocks, otherwise to ``waiting``."""
        request.status = RequestStatus.WAITING
        self._push(self.ready if request.block_ids else self.waiting, request)

    def look_up(self, request: Request) -> None:
        """Move a request to ``looking_up``."""
        request.status = RequestStatus.LOOKING_UP
        self._push(self.looking_up, request)

    def preallocate(self, request: Request) -> None:
        """Move a request to ``preallocating``."""
        request.status = RequestStatus.PREALLOCATING
        self._push(self.preallocating, request)

    def transfer(self, request: Request) -> None:
        """Move a request to ``transferring``; its load begins now."""
        request.status = RequestStatus.TRANSFERRING
        if request.scheduled_at is None:
            request.load_started_at, request.loaded_at = self.now, None
        self.transferring[request.request_id] = request

    def run(self, request: Request) -> None:
        """Move a request to ``running``, in order of priority; the workers know it from now on."""
        request.status = RequestStatus.RUNNING
        if request.scheduled_at is None:
            request.scheduled_at = self.now
            self._count_prompt(request)
        insort_right(self.running, request, key=priority_key)
        self._known.add(request.request_id)

    def _count_prompt(self, request: Request) -> None:
        computed = request.num_prompt_tokens
        for source, num_tokens in request.prompt_hits.items():
            self.prompt_tokens_by_source[source] += num_tokens
            computed -= num_tokens
        self.prompt_tokens_by_source[LOCAL_COMPUTE] += computed

    def swap(self, request: Request) -> None:
        """Move a request to ``swapped``."""
        request.status = RequestStatus.SWAPPED
        self._push(self.swapped, request)

    def follow(self, request: Request, leader: Request) -> None:
        """Move a request to ``following``, to wait for its leader's prompt; its state is kept."""
        self.dequeue(request)
        request.leader = leader
        self.following[request.request_id] = request

    def followers(self, leader: Request) -> list[Request]:
        """Returns the siblings that wait for this request's prompt."""
        if len(leader.group.members) == 1:
            return []
        return [member for member in leader.group.members if member.leader is leader]

    def follow_leader(self, leader: Request) -> None:
        """Have the siblings in ``waiting`` follow the request that now computes the prompt."""
        for member in leader.group.members[:]:
            is_waiting = self._queue_of.get(member.request_id) is self.waiting
            if member is not leader and is_waiting and member.shares_first_token:
                self.follow(member, leader)

    def release_followers(self, leader: Request) -> None:
        """Return the followers to their queues, since the leader's prompt will not be shared."""
        for follower in self.followers(leader):
            self.dequeue(follower)
            is_loading = follower.status is RequestStatus.PREALLOCATING
            self._push(self.preallocating if is_loading else self.waiting, follower)

    def dequeue(self, request: Request) -> None:
        """Remove a request from its queue."""
        if request.leader is not None:
            request.leader = None
            del self.following[request.request_id]
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.TRANSFERRING:
            del self.transferring[request.request_id]
        else:
            self._queue_of.pop(request.request_id).remove(request)

    def forget(self, request: Request) -> None:
        """Have the workers drop a request that they know."""
        if request.request_id in self._known:
            self._known.remove(request.request_id)
            self.removed.append(request.request_id)

    def take_removed(self) -> tuple[str, ...]:
        """Returns and clears the ids of the requests that the workers are to forget."""
        removed, self.removed = tuple(self.removed), []
        return removed

    def check(self) -> None:
        """Prove that every request is in one queue.

        Raises:
            AssertionError: a request is in two queues, in none, or not in its group.
        """
        queues = (self.waiting, self.ready, self.swapped, self.looking_up, self.preallocating)
        placed = [*self.running, *self.transferring.values(), *self.following.values()]
        placed += [request for queue in queues for request in queue]
        names = sorted(request.request_id for request in placed)
        assert names == sorted(self.requests), f"in two queues or in none: {names}"
        for request in placed:
            assert request in request.group.members, f"{request.request_id} has lost its group"
        for request in self.following.values():
            assert request.leader in request.group.members, "a follower of a request that is gone"

    def _push(self, queue: RequestQueue, request: Request) -> None:
        queue.push(request)
        self._queue_of[request.request_id] = queue
