"""Bad words: texts that an output must not contain, followed token by token.

A text is forbidden as a sequence of tokens: once the output ends with all of them but the last, the
last one may not follow. The prompt does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mooncake_engine.errors import InvalidRequest
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.tokenizer import Tokenizer

_MAX_SEQUENCES = 128
_MAX_TOKENS = 1024
"""vLLM's limits: sequences of tokens per request, and tokens of all of them together."""


class BadWords:
    """The bad words of one request.

    Args:
        sequences: the token ids of each, at least one.

    Attributes:
        always: the tokens that are forbidden whatever precedes them.
        num_recent: tokens at the end of the output on which the other forbidden ones depend.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self.always = tuple(tokens[0] for tokens in sequences if len(tokens) == 1)
        self.num_recent = max(len(tokens) for tokens in sequences) - 1
        self._after: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *prefix, last in sequences:
            if prefix:
                self._after.setdefault(prefix[-1], []).append((tuple(prefix), last))

    def completing(self, recent: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that would complete a word of several tokens, after these."""
        candidates = self._after.get(recent[-1], ()) if recent else ()
        return tuple(last for prefix, last in candidates if recent[-len(prefix) :] == prefix)


@dataclass(frozen=True, slots=True)
class BadWordState:
    """The position of one output in its request's bad words.

    Args:
        words: the bad words.
        recent: the newest output tokens, as many as ``words`` needs.
    """

    words: BadWords
    recent: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, ...]], output: Sequence[int]) -> BadWordState | None:
        """The position after an output; None without bad words."""
        if not sequences:
            return None
        words = BadWords(sequences)
        return cls(words, tuple(output[max(0, len(output) - words.num_recent) :]))

    @property
    def depends_on_tokens(self) -> bool:
        """Whether what is forbidden changes with the output."""
        return self.words.num_recent > 0

    def after(self, token_id: int) -> BadWordState:
        """The position one token later."""
        if not self.depends_on_tokens:
            return self
        kept = self.words.num_recent - 1
        recent = self.recent[max(0, len(self.recent) - kept) :] if kept else ()
        return replace(self, recent=(*recent, token_id))

    def forbidden(self) -> tuple[int, ...]:
        """The tokens that may not come next."""
        completing = self.words.completing(self.recent)
        return (*self.words.always, *completing) if completing else self.words.always


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the token ids of their ``bad_words``, as vLLM forms them: each text as it
    begins an output and, if that is as many tokens of which the first differs, after a space.

    Raises:
        InvalidRequest: there are too many, one of them has no tokens, or together they are all that
            ``allowed_token_ids`` allow.
    """
    if not sampling.bad_words:
        return sampling
    sequences: list[tuple[int, ...]] = []
    for text in dict.fromkeys(sampling.bad_words):
        word = text.lstrip()
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if not tokens:
            raise InvalidRequest(
                f"bad_words contains {text!r}, which has no tokens; leave it out", param="bad_words"
            )
        sequences.append(tokens)
        spaced = tokenizer.encode(f" {word}", add_special_tokens=False)
        if len(spaced) == len(tokens) and spaced[0] != tokens[0]:
            sequences.append(spaced)
        _check_size(sequences)
    always = {tokens[0] for tokens in sequences if len(tokens) == 1}
    if sampling.allowed_token_ids is not None and always.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "bad_words forbid all of allowed_token_ids, so no token could be sampled",
            param="bad_words",
        )
    return replace(sampling, bad_words_token_ids=tuple(sequences))


def _check_size(sequences: Sequence[tuple[int, ...]]) -> None:
    num_tokens = sum(map(len, sequences))
    if len(sequences) > _MAX_SEQUENCES or num_tokens > _MAX_TOKENS:
        raise InvalidRequest(
            f"bad_words may have at most {_MAX_SEQUENCES} sequences of tokens, with and without a "
            f"space before them, and {_MAX_TOKENS} tokens together; got at least {len(sequences)} "
            f"with {num_tokens}",
            param="bad_words",
        )
