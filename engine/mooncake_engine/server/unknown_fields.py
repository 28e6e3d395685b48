"""Decides whether an unknown request field is ignored or rejected; used by ``decode_request``.

Clients send fields of other servers: accounting, caching hints, their own tags. These are ignored
if they change no answer; in messages and tools always, whose types skip them. A field that would
change the answer is rejected, whether it is another server's or a misspelt known one.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from typing import Any

from mooncake_engine.errors import InvalidRequest

logger = logging.getLogger(__name__)

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
    "functions": "tools",
    "function_call": "tool_choice",
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
    "functions": [],
    "function_call": "none",
    "structured_outputs.disable_fallback": False,
    "structured_outputs.disable_any_whitespace": False,
    "structured_outputs.disable_additional_properties": False,
}
"""Values of these fields that match this server's behaviour. Clients that send every parameter send
them, and they are ignored, as null is."""
_MAX_COMPARED_CHARACTERS = 64
"""Longer names are no misspelt fields. Comparing a name costs its length times that of each."""
_MAX_IGNORED = 32
_MAX_WARNED = 256
_warned: set[str] = set()


def ignore_unknown(body: dict[str, Any], known: Collection[str]) -> None:
    """Remove the unknown fields of a body, and log those that ask for something. Those with values
    that match this server's behaviour don't: a client that sends every parameter of another server
    sends dozens.

    Args:
        body: the decoded body.
        known: the known fields of the body.

    Raises:
        InvalidRequest: a field can't be ignored, or there are too many.
    """
    unknown = [field for field in body if field not in known]
    asking = [field for field in unknown if not _has_no_effect(body[field], field)]
    if len(asking) > _MAX_IGNORED:
        raise InvalidRequest(f"the body has more than {_MAX_IGNORED} unknown fields")
    for field in asking:
        if message := _refusal(field, known):
            raise InvalidRequest(message, param=field)
        _warn_once(field)
    for field in unknown:
        del body[field]


def remove_without_effect(body: dict[str, Any], path: str, field: str) -> None:
    """Remove all fields without effect from an object within a body, and from its siblings in the
    lists on that path.

    Args:
        body: the decoded body.
        path: the object, such as ``structured_outputs``.
        field: an unknown field of the object, or of one of its siblings.

    Raises:
        InvalidRequest: the unknown field would have an effect: any that is set in an object
            within the body asks for some behaviour.
    """
    name = f"{path}.{field}"
    objects = _objects_at(body, path)
    values = [item[field] for item in objects if field in item]
    if not values or not all(_has_no_effect(value, name) for value in values):
        raise InvalidRequest(f"unknown field {name}; remove it", param=name)
    for item in objects:
        for key in [key for key in item if _has_no_effect(item[key], f"{path}.{key}")]:
            del item[key]


def _has_no_effect(value: Any, name: str) -> bool:
    return value is None or (name in _NO_EFFECT_VALUES and value == _NO_EFFECT_VALUES[name])


def _refusal(field: str, known: Collection[str]) -> str | None:
    """The error message for an unknown field of a body; None if it can be ignored."""
    if field in _ALTERNATIVES:
        return f"{field} is not supported: use {_ALTERNATIVES[field]}"
    if field in _REJECTED:
        return f"{field} is not supported; remove it"
    if len(field) > _MAX_COMPARED_CHARACTERS:
        return None
    nearest = difflib.get_close_matches(field, known, n=1, cutoff=0.75)
    return f"unknown field {field}; did you mean {nearest[0]}?" if nearest else None


def _objects_at(body: Any, path: str) -> list[dict[str, Any]]:
    found = [body]
    for step in re.findall(r"[^.\[\]]+|\[", path):
        if step == "[":
            found = [item for items in found if isinstance(items, list) for item in items]
        elif not step.isdigit():
            found = [item[step] for item in found if isinstance(item, dict) and item.get(step)]
    return [item for item in found if isinstance(item, dict)]


def _warn_once(field: str) -> None:
    """Log an ignored field, once per field and for a bounded number of fields."""
    if field in _warned or len(_warned) >= _MAX_WARNED:
        return
    _warned.add(field)
    logger.warning("ignoring the unknown request field %r", field[:100])
