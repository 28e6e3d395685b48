"""Prompts whose KV a peer holds, on a decode instance: who loads which, once. Pure."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum, auto

PeerKey = tuple[str, str]
"""What tells a prompt from all others: its holder and lease, or the URL that it is posted to."""


class PromptState(Enum):
    """Where the hand-over of a prompt stands."""

    EXPECTED = auto()
    """The peer holds it, and nobody here has taken it."""
    LOADING = auto()
    """One request has blocks for it."""
    LOADED = auto()
    """It is here, and vLLM has yet to run who loaded it: only then its prefix cache has it."""
    OVER = auto()
    """Loaded, failed or not needed: the peer has nothing for us any more."""


@dataclass(slots=True)
class RemotePrompt:
    """A prompt that a peer holds for one request, or for all ``n`` children of one.

    Args:
        name: what the connector calls it: the id of the request that came first.
        key: what children of one request have in common.
        num_tokens: whose KV is there.
        num_more: tokens of the request behind those, which are computed here.
        members: requests that are here and want it.
        loader: the one that loads it.
    """

    name: str
    key: PeerKey
    num_tokens: int
    num_more: int
    members: set[str] = field(default_factory=set)
    state: PromptState = PromptState.EXPECTED
    loader: str | None = None


class RemotePrompts:
    """All of them, by request. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_request: dict[str, RemotePrompt] = {}
        self._by_key: dict[PeerKey, RemotePrompt] = {}
        self._by_name: dict[str, RemotePrompt] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def is_loading(self) -> bool:
        """Whether any of them is."""
        with self._lock:
            return any(each.state is PromptState.LOADING for each in self._by_name.values())

    def expect(self, request_id: str, key: PeerKey, num_tokens: int, num_more: int = 0) -> bool:
        """A request has come; returns whether it is the first for this prompt."""
        with self._lock:
            prompt = self._by_key.get(key)
            is_first = prompt is None
            if prompt is None:
                prompt = RemotePrompt(request_id, key, num_tokens, num_more)
                self._by_key[key] = self._by_name[request_id] = prompt
            prompt.members.add(request_id)
            self._by_request[request_id] = prompt
        return is_first

    def num_to_load(self, request_id: str, num_computed: int) -> int | None:
        """How many tokens a request can load beyond what it has; None: ask again, another request
        is loading them. No side effects.

        The last token of a request is computed in any case, so that it alone is not worth a load.
        """
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state is PromptState.OVER:
                return 0
            if prompt.state is not PromptState.EXPECTED:
                return 0 if prompt.loader == request_id else None
            remaining = prompt.num_tokens - num_computed
            return remaining if remaining + prompt.num_more > 1 else 0

    def begin(self, request_id: str) -> str | None:
        """A request has blocks, and loads; returns the connector's name for the prompt, or None if
        it has been taken meanwhile."""
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state is not PromptState.EXPECTED:
                return None
            prompt.state, prompt.loader = PromptState.LOADING, request_id
            return prompt.name

    def skip(self, request_id: str) -> str | None:
        """A request runs, with what it has; returns the name of a prompt that nobody here has taken
        and nobody will, so that the peer may free it, or None."""
        with self._lock:
            prompt = self._by_request.get(request_id)
            if prompt is None or prompt.state in (PromptState.LOADING, PromptState.OVER):
                return None
            was_expected = prompt.state is PromptState.EXPECTED
            if was_expected or prompt.loader == request_id:
                prompt.state = PromptState.OVER
            return prompt.name if was_expected else None

    def end(self, name: str, *, is_loaded: bool = False) -> str | None:
        """The connector has done with a prompt; returns the request that was loading it, if any."""
        with self._lock:
            prompt = self._by_name.get(name)
            if prompt is None:
                return None
            was_loading = prompt.state is PromptState.LOADING
            has_loader = was_loading and prompt.loader in prompt.members
            prompt.state = PromptState.LOADED if is_loaded and has_loader else PromptState.OVER
            if not prompt.members:
                self._drop(prompt)
            return prompt.loader if was_loading else None

    def leave(self, request_id: str) -> str | None:
        """A request has ended; returns the name of a prompt whose hand-over is to be cancelled."""
        with self._lock:
            prompt = self._by_request.pop(request_id, None)
            if prompt is None:
                return None
            prompt.members.discard(request_id)
            is_loading = prompt.state is PromptState.LOADING
            if is_loading and prompt.loader == request_id:
                return prompt.name
            if prompt.state is PromptState.LOADED and prompt.loader == request_id:
                prompt.state = PromptState.OVER
            if prompt.members or is_loading:
                return None
            was_expected = prompt.state is PromptState.EXPECTED
            self._drop(prompt)
            return prompt.name if was_expected else None

    def _drop(self, prompt: RemotePrompt) -> None:
        self._by_key.pop(prompt.key, None)
        self._by_name.pop(prompt.name, None)
