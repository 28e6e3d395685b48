"""Prompts for a trace that has none: as long as it says, and equal where it says so."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from mooncake_engine.replay.trace import TraceRequest

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
)


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """Writes prompts of common words.

    Args:
        tokens_per_word: of the model's tokenizer.
        block_tokens: tokens that a block name of the trace stands for.
    """

    tokens_per_word: float = 1.0
    block_tokens: int = 512

    def write(self, request: TraceRequest, index: int) -> str:
        """The prompt of request number ``index``; prompts begin alike as far as their blocks have
        the same names. Where blocks have no names, every prompt has content of its own."""
        if request.text is not None:
            return request.text
        num_words = max(1, round(request.num_input / self.tokens_per_word))
        per_block = max(1, round(self.block_tokens / self.tokens_per_word))
        words: list[str] = []
        for position in range(-(-num_words // per_block)):
            named = position < len(request.block_ids)
            name = request.block_ids[position] if named else f"{index}/{position}"
            words += _block(str(name), per_block)
        return " ".join(words[:num_words])


@lru_cache(maxsize=1024)
def _block(name: str, num_words: int) -> list[str]:
    return random.Random(f"block {name}").choices(_WORDS, k=num_words)


def probe_text(num_words: int, seed: str) -> str:
    """Words of the same kind, to measure how many tokens they make."""
    return " ".join(random.Random(seed).choices(_WORDS, k=num_words))
