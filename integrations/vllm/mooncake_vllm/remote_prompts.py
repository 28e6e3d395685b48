"""The prompts whose KV peers hold for a decode instance, and which request loads each one. Pure: no
I/O."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

PeerKey = tuple[str, str]
"""Identifies a prompt: the holder's epoch and its request id, or the metaserver's URL and
NOT_REQUESTED."""
NOT_REQUESTED = ""
"""No request id yet: the prefill is requested by the load, which reserves the blocks for it."""


class PromptState(Enum):
    """State of a prompt's transfer."""

    EXPECTED = auto()
    """The peer holds it, and no request here has begun to load it."""
    LOADING = auto()
    """One request has blocks for it, and is loading it."""
    LOADED = auto()
    """It is loaded, but vLLM has not run its loader yet: only then it is in vLLM's prefix cache."""
    FINISHED = auto()
    """Loaded, failed or not needed: the peer no longer holds it for us."""


@dataclass(slots=True)
class RemotePrompt:
    """A prompt that a peer holds for one request, or for all ``n`` children of one.

    Args:
        name: the connector's name for it: the id of the first request that wanted it.
        key: identifies the prompt; the same for all children of a request.
        tokens: the tokens whose KV the peer holds.
        num_more: number of the request's prompt tokens after those, which are computed here.
        members: live requests that want it.
        state: the state of its transfer.
        loader: the request that loads it.
    """

    name: str
    key: PeerKey
    tokens: Sequence[int]
    num_more: int
    members: set[str] = field(default_factory=set)
    state: PromptState = PromptState.EXPECTED
    loader: str | None = None


class RemotePrompts:
    """All prompts that peers hold for this instance, by request. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_request: dict[str, RemotePrompt] = {}
        self._by_key: dict[PeerKey, RemotePrompt] = {}
        self._by_name: dict[str, RemotePrompt] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def is_loading(self) -> bool:
        """Whether any prompt is being loaded."""
        with self._lock:
            return any(each.state is PromptState.LOADING for each in self._by_name.values())

    @property
    def are_only_held_by_peers(self) -> bool:
        """Whether peers hold prompts for requests here, and none is being loaded."""
        with self._lock:
            states = [p.state for p in self._by_name.values() if p.key[1] != NOT_REQUESTED]
        return PromptState.EXPECTED in states and PromptState.LOADING not in states

    def is_known(self, key: PeerKey) -> bool:
        """Whether a live request, or a load in flight, is for this prompt."""
        with self._lock:
            return key in self._by_key

    def is_another(self, key: PeerKey, tokens: Sequence[int]) -> bool:
        """Whether requests with other tokens than these expect the KV that this key names."""
        with self._lock:
            prompt = self._by_key.get(key)
            return prompt is not None and prompt.tokens != tokens

    def expect(
        self, request_id: str, key: PeerKey, tokens: Sequence[int], num_more: int = 0
    ) -> bool:
        """Add a request; returns whether it is the first for this prompt."""
        with self._lock:
            prompt = self._by_key.get(key)
            is_first = prompt is None
            if prompt is None:
                prompt = RemotePrompt(request_id, key, tokens, num_more)
                self._by_key[key] = self._by_name[request_id] = prompt
            prompt.members.add(request_id)
            self._by_request[request_id] = prompt
        return is_first

    def num_to_load(self, request_id: str, num_computed: int) -> int | None:
        """Number of tokens that a request can load beyond its computed ones; None: ask again,
        another request is loading them. No side effects.

        The last token of a request is always computed, so a load of that token alone is skipped.
        """
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state is PromptState.FINISHED:
                return 0
            if prompt.state is not PromptState.EXPECTED:
                return 0 if prompt.loader == request_id else None
            remaining = len(prompt.tokens) - num_computed
            return remaining if remaining + prompt.num_more > 1 else 0

    def begin(self, request_id: str) -> str | None:
        """Start loading into a request's blocks. Returns the connector's name for the prompt, or
        None if it is no longer available."""
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state is not PromptState.EXPECTED:
                return None
            prompt.state, prompt.loader = PromptState.LOADING, request_id
            return prompt.name

    def skip(self, request_id: str) -> str | None:
        """Run a request without loading. Returns the name of a prompt that no request here has
        loaded or will load, so that the peer may free it; otherwise None."""
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state in (PromptState.LOADING, PromptState.FINISHED):
                return None
            was_expected = prompt.state is PromptState.EXPECTED
            if was_expected or prompt.loader == request_id:
                prompt.state = PromptState.FINISHED
            return prompt.name if was_expected else None

    def is_held_by_peer(self, name: str) -> bool:
        """Whether a peer has computed a prompt that is known here, rather than waits for a load to
        request it."""
        with self._lock:
            prompt = self._by_name.get(name)
            return prompt is not None and prompt.key[1] != NOT_REQUESTED

    def end(self, name: str, *, is_loaded: bool = False) -> str | None:
        """Process the end of a prompt's transfer; returns the request that was loading it, if
        any."""
        with self._lock:
            prompt = self._by_name.get(name)
            if prompt is None:
                return None
            was_loading = prompt.state is PromptState.LOADING
            has_loader = was_loading and prompt.loader in prompt.members
            prompt.state = PromptState.LOADED if is_loaded and has_loader else PromptState.FINISHED
            if not prompt.members:
                self._drop(prompt)
            return prompt.loader if was_loading else None

    def leave(self, request_id: str) -> str | None:
        """Remove a request that has ended; returns the name of a prompt whose transfer is to be
        cancelled, if any."""
        with self._lock:
            prompt = self._by_request.pop(request_id, None)
            if prompt is None:
                return None
            prompt.members.discard(request_id)
            is_loading = prompt.state is PromptState.LOADING
            if is_loading and prompt.loader == request_id:
                return prompt.name
            if prompt.state is PromptState.LOADED and prompt.loader == request_id:
                prompt.state = PromptState.FINISHED
            if prompt.members or is_loading:
                return None
            was_expected = prompt.state is PromptState.EXPECTED
            self._drop(prompt)
            return prompt.name if was_expected else None

    def _drop(self, prompt: RemotePrompt) -> None:
        self._by_key.pop(prompt.key, None)
        self._by_name.pop(prompt.name, None)
