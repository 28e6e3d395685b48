"""Where a request stands in the grammar that its answer follows."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from mooncake_engine.errors import InvalidRequest, RequestFailed
from mooncake_engine.sampling_params import Grammar
from mooncake_engine.scheduling.plan import AdmittedRequest
from mooncake_engine.text.grammars import GrammarMatcher, Vocabulary

FindVocabulary = Callable[[], Vocabulary]
"""Finds or builds the process's vocabulary: not before a request wants a grammar."""


def no_vocabulary() -> Vocabulary:
    """Where there is no tokenizer: every grammar is refused."""
    raise InvalidRequest("this engine has no tokenizer for grammars", param="grammar")


class GrammarState:
    """One request's place in its grammar. What breaks it is the request's failure alone.

    Args:
        find_vocabulary: see there.
        admitted: a request with a grammar; its answer so far, from another instance or from before
            a preemption, is read in.
    """

    def __init__(self, find_vocabulary: FindVocabulary, admitted: AdmittedRequest) -> None:
        grammar = admitted.sampling.grammar
        assert grammar is not None, "a request without a grammar has no place in one"
        self.failure: str | None = None
        self._matcher = self._begin(find_vocabulary, grammar)
        for token_id in admitted.token_ids[admitted.num_prompt_tokens :]:
            self.accept(token_id)

    def accept(self, token_id: int) -> None:
        """The answer goes on with this token."""
        if self._matcher is not None:
            self._matcher.accept(token_id)

    def allowed(self) -> bytes | None:
        """As of ``GrammarMatcher``; None, and ``failure`` set, if there is no telling any more."""
        if self._matcher is None:
            return None
        try:
            return self._matcher.allowed()
        except RequestFailed as exc:
            self._matcher, self.failure = None, str(exc)
            return None

    def after(self, token_id: int) -> GrammarState | None:
        """A state of its own, one token later; None if the answer can't go on so."""
        allowed = self.allowed()
        if allowed is None or not allowed[token_id // 8] >> token_id % 8 & 1:
            return None
        later = copy(self)
        later._matcher = None if self._matcher is None else self._matcher.copy()
        later.accept(token_id)
        return None if later.allowed() is None else later

    def _begin(self, find_vocabulary: FindVocabulary, grammar: Grammar) -> GrammarMatcher | None:
        try:
            return find_vocabulary().matcher(grammar)
        except InvalidRequest as exc:  # unchecked by whoever sent it
            self.failure = str(exc)
            return None
