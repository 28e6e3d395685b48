"""A queue of requests by priority, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from mooncake_engine.scheduling.request import Request


def urgency(request: Request) -> tuple[int, float, int]:
    """Sort key: smaller runs sooner, larger is preempted sooner."""
    return request.group.urgency


class RequestQueue:
    """Requests in order of urgency. A request keeps its place in line when it comes back."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], int, Request]] = []
        self._members: dict[str, Request] = {}
        self._ties = count()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def push(self, request: Request) -> None:
        """Put a request in its place."""
        heapq.heappush(self._heap, (urgency(request), next(self._ties), request))
        self._members[request.request_id] = request

    def peek(self) -> Request | None:
        """The most urgent request, or None."""
        while self._heap:
            request = self._heap[0][2]
            if self._members.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a member out, wherever it stands."""
        del self._members[request.request_id]

    def least_urgent(self) -> Request | None:
        """The request that gives way first, or None."""
        return max(self._members.values(), key=urgency, default=None)
