"""Decides whether an unknown request field is ignored or rejected; used by ``decode_request``.

Clients send fields of other servers: accounting, caching hints, their own tags. These are ignored
if they change no answer. A field that would change the answer is rejected, whether it is another
server's or a misspelt known one.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from typing import Any

logger = logging.getLogger(__name__)

_EXTENSIBLE_OBJECTS = re.compile(r"(messages|tools)(\[|\.|$)")
"""Paths of objects to which clients add fields without effect on the answer; their known fields are
complete. An unknown field in any other object requests some behaviour."""
_ALTERNATIVES = {
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "repeat_penalty": "repetition_penalty",
    "typical_p": "top_p or min_p",
    "length_penalty": "best_of",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "best_of": "n",
    "do_sample": "temperature",
    "stop_sequences": "stop",
    "reasoning": "reasoning_effort",
    "chat_template": "--chat-template at start",
    "thinking": "chat_template_kwargs, as the model's template has it",
    "enable_thinking": "chat_template_kwargs",
    "thinking_token_budget": "max_tokens",
    "input": "prompt or messages",
    "images": "text",
    "documents": "messages",
}
_REJECTED = frozenset(
    {
        *("logits_processors", "prompt_embeds", "vllm_xargs", "lora_path"),
        *("logit_processors", "custom_logit_processor"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "xtc_probability", "tfs_z"),
        *("top_a", "grammar", "json_schema", "regex", "ebnf", "response_schema", "tool_config"),
        *("use_beam_search", "num_beams", "no_repeat_ngram_size", "echo", "suffix", "stop_regex"),
        *("spaces_between_special_tokens", "structural_tag", "watermarking"),
        *("repetition_detection", "logprob_token_ids", "return_token_offsets"),
    }
)
_NO_EFFECT_VALUES: dict[str, Any] = {
    "best_of": 1,
    "do_sample": True,
    "stop_sequences": [],
    "use_beam_search": False,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "echo": False,
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "logits_processors": [],
    "vllm_xargs": {},
    "return_token_offsets": False,
    "watermarking": False,
    "structured_outputs.disable_fallback": False,
    "structured_outputs.disable_any_whitespace": False,
    "structured_outputs.disable_additional_properties": False,
}
"""Values of these fields that match this server's behaviour. Clients that send every parameter send
them, and they are ignored, as null is."""
_MAX_COMPARED_CHARACTERS = 64
"""Longer names are no misspelt fields. Comparing a name costs its length times that of each."""
_MAX_WARNED = 256
_warned: set[str] = set()


def refusal(body: Any, field: str, path: str, known: list[str]) -> str | None:
    """The error message for an unknown field that can't be ignored; None if it can be ignored.

    Args:
        body: the decoded body.
        field: the name of the field.
        path: the object that holds it, such as ``messages[0]``; empty for the body itself.
        known: the known fields of the body.
    """
    name = f"{path}.{field}" if path else field
    harmless = (None, _NO_EFFECT_VALUES.get(name))
    if path and not _EXTENSIBLE_OBJECTS.match(path):
        values = [item.get(field) for item in _objects_at(body, path)]
        if values and all(value in harmless for value in values):
            return None
        return f"unknown field {name}; remove it"
    if path or body.get(field) in harmless:
        return None
    if field in _ALTERNATIVES:
        return f"{field} is not supported: use {_ALTERNATIVES[field]}"
    if field in _REJECTED:
        return f"{field} is not supported; remove it"
    if len(field) > _MAX_COMPARED_CHARACTERS:
        return None
    nearest = difflib.get_close_matches(field, known, n=1, cutoff=0.75)
    return f"unknown field {field}; did you mean {nearest[0]}?" if nearest else None


def remove_defaults(body: Any, known: Collection[str]) -> None:
    """Remove the unknown fields of a body whose values match this server's behaviour: a client that
    sends every parameter of another server sends dozens.

    Args:
        body: the decoded body.
        known: the known fields of the body.
    """
    if isinstance(body, dict):
        unknown = [field for field in body if field not in known]
        for field in unknown:
            if body[field] in (None, _NO_EFFECT_VALUES.get(field)):
                del body[field]


def remove(value: Any, path: str, field: str) -> None:
    """Remove a field from a decoded body: from the object at ``path``, and from its siblings in the
    lists on that path."""
    for item in _objects_at(value, path):
        item.pop(field, None)


def _objects_at(value: Any, path: str) -> list[dict[str, Any]]:
    found = [value]
    for step in re.findall(r"[^.\[\]]+|\[", path):
        if step == "[":
            found = [item for items in found if isinstance(items, list) for item in items]
        elif not step.isdigit():
            found = [item[step] for item in found if isinstance(item, dict) and item.get(step)]
    return [item for item in found if isinstance(item, dict)]


def warn_once(field: str, path: str) -> None:
    """Log an ignored field, once per field and for a bounded number of fields."""
    name = re.sub(r"\[\d+\]", "[]", f"{path}.{field}" if path else field)
    if name in _warned or len(_warned) >= _MAX_WARNED:
        return
    _warned.add(name)
    logger.warning("ignoring the unknown request field %r", name[:100])
