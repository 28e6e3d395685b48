"""SpeculativeConfig: the options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from mooncake_engine.errors import ConfigError
from mooncake_hal.options import option


class SpeculativeMethod(str, Enum):
    """The source of draft tokens."""

    NGRAM = "ngram"
    """The tokens that followed the same n-gram earlier in prompt and output."""
    DRAFT = "draft"
    """A smaller draft model."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Configuration of speculative decoding: draft tokens, so that one step of the model may yield
    several tokens.

    A draft model must have the model's vocabulary. ``prompt_lookup_min`` and ``prompt_lookup_max``
    are 2 and 5 by default; if only one of them is given, the other one is equal to it.
    """

    method: SpeculativeMethod = field(
        metadata=option(
            "--speculative-method",
            help="speculative decoding: draft tokens from n-grams of prompt and output, or from a "
            "draft model",
            is_required=False,
        )
    )
    num_speculative_tokens: int = field(
        default=4,
        metadata=option(
            is_unset_by_default=True,
            metavar="TOKENS",
            help="maximum number of draft tokens per request and step",
        ),
    )
    model: Path | None = field(
        default=None,
        metadata=option(
            "--speculative-model", metavar="MODEL", help="draft model, in the form of --model"
        ),
    )
    prompt_lookup_min: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            default_text="2",
            help="minimum n-gram length to look up in prompt and output",
        ),
    )
    prompt_lookup_max: int | None = field(
        default=None,
        metadata=option(
            metavar="TOKENS",
            default_text="5",
            help="maximum n-gram length to look up in prompt and output",
        ),
    )

    disable_by_batch_size: int | None = field(
        default=None,
        metadata=option(
            "--speculative-disable-by-batch-size",
            metavar="N",
            default_text="by measured steps, when drafts cost more than they gain",
            help="maximum number of sequences in a step with draft tokens",
        ),
    )

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "disable_by_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.method == SpeculativeMethod.NGRAM:
            if self.model is not None:
                raise ConfigError(
                    f"speculative method 'ngram' uses no draft model, but {self.model} was given "
                    "as one; leave it out, or use method 'draft'"
                )
            low, high = self.prompt_lookup
            if not 1 <= low <= high:
                raise ConfigError(
                    f"wanted 1 <= prompt_lookup_min <= prompt_lookup_max, got {low} and {high}"
                )
        elif self.model is None:
            raise ConfigError(
                "speculative method 'draft' needs a draft model: set the speculative model to its "
                "directory, or use 'ngram', which needs none"
            )
        elif self.prompt_lookup_min is not None or self.prompt_lookup_max is not None:
            raise ConfigError(
                "prompt_lookup_min and prompt_lookup_max are for speculative method 'ngram', but "
                "'draft' was requested; leave them out"
            )

    @property
    def prompt_lookup(self) -> tuple[int, int]:
        """Minimum and maximum n-gram length."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 2, 5
        return (high or 0) if low is None else low, (low or 0) if high is None else high
