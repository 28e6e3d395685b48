"""From token ids to text, one token at a time.

What comes out depends on the token ids alone, not on how they were grouped or when they came. A
decode instance therefore replays the first token, which the prefill instance has already shown to
the client, and continues at exactly the character where the other one stopped.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.stop_strings import StopStringFinder
from mooncake_engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of a growing answer; each token costs the same, however long the answer is.

    Held back until it is certain: bytes of an incomplete character, and characters that may
    begin a stop string. As in vLLM, stop strings count only after more than ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStringFinder(sampling.stop) if sampling.stop else None
        self._is_stop_kept = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._held = ""
        self.num_tokens = 0
        self.num_characters = 0
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that is now certain.

        Once ``stop_string`` is set the text is complete; ``num_tokens`` counts up to the token
        that completed it, and later tokens are ignored. ``num_characters`` counts what was
        decoded, held back or not.
        """
        if self._stops is None:
            return self._decode(token_ids)
        parts = []
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            parts.append(self._release(self._decode((token_id,))))
        return "".join(parts)

    def finish(self) -> str:
        """The answer has ended: the rest of its text, an incomplete character as ``\\ufffd``."""
        if self.stop_string is not None:
            return ""
        rest = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        return rest

    def _decode(self, token_ids: Sequence[int]) -> str:
        self.num_tokens += len(token_ids)
        encoded = b"".join(
            self._token_bytes(token_id)
            for token_id in token_ids
            if token_id not in self._skipped_ids
        )
        text = self._decoder.decode(encoded)
        self.num_characters += len(text)
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


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Per token, how many characters of the text are complete before it."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams())
    offsets = []
    for token_id in token_ids:
        offsets.append(detokenizer.num_characters)
        detokenizer.push((token_id,))
    return tuple(offsets)
