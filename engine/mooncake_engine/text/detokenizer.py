"""Detokenises an output incrementally, token by token, up to a stop string.

The text depends only on the token ids, not on how they were grouped into updates or when they
arrived. A decode instance can therefore replay the first token, whose text the prefill instance has
already delivered to the client, and continue at exactly the character where the prefill instance
stopped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found; it ends after ``end`` characters of the text fed last."""

    stop: str
    end: int


class StopStringFinder:
    """Finds stop strings in text that arrives in pieces, with one automaton per stop string (Knuth,
    Morris and Pratt 1977).

    The stop string that is complete first wins; of several that end at the same character, the
    longest wins. The result therefore does not depend on how the text was split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops]

    @property
    def num_held(self) -> int:
        """The number of characters at the end of the text that may be the start of a stop
        string."""
        return max((automaton.num_matched for automaton in self._automata), default=0)

    def feed(self, text: str) -> StopMatch | None:
        """Read more text; returns the first complete stop string, or None.

        Every automaton always reads all of ``text``. Feeding more text after a match therefore
        means that the match is ignored."""
        matches = [
            StopMatch(automaton.pattern, end)
            for automaton in self._automata
            if (end := automaton.feed(text)) is not None
        ]
        return min(matches, key=lambda match: (match.end, -len(match.stop)), default=None)


class _Automaton:
    """Matches one stop string, character by character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.num_matched = 0
        self._fallback = _fallback_table(pattern)

    def feed(self, text: str) -> int | None:
        """The number of characters after which the pattern is first complete, or None."""
        first_end = None
        pattern, fallback, matched = self.pattern, self._fallback, self.num_matched
        for position, character in enumerate(text, start=1):
            while matched and pattern[matched] != character:
                matched = fallback[matched - 1]
            if pattern[matched] == character:
                matched += 1
            if matched == len(pattern):
                first_end = position if first_end is None else first_end
                matched = fallback[matched - 1]
        self.num_matched = matched
        return first_end


def _fallback_table(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper suffix that is a prefix of
    the pattern, too."""
    table = [0] * len(pattern)
    matched = 0
    for position in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[position]:
            matched = table[matched - 1]
        if pattern[matched] == pattern[position]:
            matched += 1
        table[position] = matched
    return table


class IncrementalDetokenizer:
    """Decodes a growing output; the cost per token does not depend on the output's length.

    Bytes of an incomplete character, and characters that may start a stop string, are held back
    until their meaning is certain. As in vLLM, stop strings are honoured only after more than
    ``min_tokens`` tokens.

    Args:
        tokenizer: the model's tokenizer.
        sampling: the sampling parameters: stop strings, ``min_tokens``, special tokens.
        shown: special tokens that stay in the text even where special tokens are skipped.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_is_between",
        "_is_stop_kept",
        "_min_tokens",
        "_skipped_ids",
        "_stops",
        "_token_bytes",
        "_token_texts",
        "num_characters",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, shown: Sequence[str] = ()
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._token_texts = tokenizer.token_texts
        self._is_between = True  # between characters: no bytes of an incomplete one are held
        self._skipped_ids = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        if shown and self._skipped_ids:
            self._skipped_ids -= tokenizer.ids_of(shown)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStringFinder(sampling.stop) if sampling.stop else None
        self._is_stop_kept = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._held = ""
        self.num_tokens = 0
        self.num_characters = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is now final.

        Once ``stop_string`` is set the text is complete, and later tokens are ignored.
        ``num_tokens`` counts the tokens up to the one that completed the stop string.
        ``num_characters`` counts all decoded characters, including those that are held back.
        """
        parts = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            parts.append(self.push_token(token_id))
        return "".join(parts)

    def replay(self, token_ids: Sequence[int]) -> str:
        """Add the first tokens of an output that another instance has generated; returns the text
        that is final with them. No stop string ended the output there."""
        min_tokens, self._min_tokens = self._min_tokens, len(token_ids)
        text = self.push(token_ids)
        self._min_tokens = min_tokens
        return text

    def push_token(self, token_id: int) -> str:
        """Like ``push`` for one token. Must not be called once ``stop_string`` is set."""
        self.num_tokens += 1
        text = ""
        if token_id not in self._skipped_ids:
            whole = self._token_texts[token_id] if self._is_between else None
            text = self._decode_bytes(token_id) if whole is None else whole
            self.num_characters += len(text)
        return text if self._stops is None else self._release(text)

    def finish(self) -> str:
        """The rest of the text when the output has ended; an incomplete character becomes
        ``\\ufffd``."""
        if self.stop_string is not None:
            return ""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return rest

    def _decode_bytes(self, token_id: int) -> str:
        """Decode a token that starts or continues an incomplete character."""
        text = self._decoder.decode(self._token_bytes(token_id))
        held, _ = self._decoder.getstate()
        self._is_between = not held
        return text

    def _release(self, text: str) -> str:
        assert self._stops is not None
        match = self._stops.feed(text)
        known = self._held + text
        if match is not None and self.num_tokens > self._min_tokens:
            self.stop_string = match.stop
            end = len(self._held) + match.end
            self._held = ""
            return known[: end if self._is_stop_kept else end - len(match.stop)]
        certain = len(known) - self._stops.num_held
        self._held = known[certain:]
        return known[:certain]


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """For each token of a prompt, the number of characters of the prompt's text before it.

    The text may lack special tokens, which the tokenizer adds or which are skipped, and spaces that
    SentencePiece writes before words at the start.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(skip_special_tokens=False))
    offsets, end = [], 0
    for token_id in token_ids:
        offsets.append(min(end, len(text)))
        piece = detokenizer.push_token(token_id)
        if not text.startswith(piece, end):
            if token_id in tokenizer.special_ids:
                continue
            if piece.startswith(" ") and text.startswith(piece[1:], end):
                end -= 1
        end += len(piece)
    return tuple(offsets)
