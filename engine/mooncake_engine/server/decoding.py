"""From a request's bytes to a typed request, with refusals that name the field."""

from __future__ import annotations

import difflib
import re
from typing import TypeVar

import msgspec

from mooncake_engine.errors import InvalidRequest

RequestType = TypeVar("RequestType", bound=msgspec.Struct)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*?)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`")
_NOT_SUPPORTED = "Expected `null`"


def decode_request(body: bytes, request_type: type[RequestType]) -> RequestType:
    """Parse and type-check.

    Raises:
        InvalidRequest: malformed JSON, an unknown field (with the nearest known one), a missing
            field, a wrong type, or an OpenAI field that this server does not support.
    """
    try:
        return msgspec.json.decode(body, type=request_type)
    except msgspec.ValidationError as exc:
        raise _explain(str(exc), request_type) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(f"the body must be a JSON object: {exc}") from exc


def _explain(message: str, request_type: type[msgspec.Struct]) -> InvalidRequest:
    path_match = _PATH.search(message)
    path = path_match["path"] if path_match else ""
    fact = message[: path_match.start()] if path_match else message
    if unknown := _UNKNOWN.match(message):
        return _explain_unknown(unknown["field"], path, request_type)
    if missing := _MISSING.match(message):
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return InvalidRequest(f"{param} is required", param=param)
    if message.startswith(_NOT_SUPPORTED):
        return InvalidRequest(
            f"{path} is not supported by this server; leave it out or send null", param=path
        )
    if path:
        return InvalidRequest(f"{path}: {fact[0].lower()}{fact[1:]}", param=path)
    return InvalidRequest(f"the body must be a JSON object: {fact[0].lower()}{fact[1:]}")


def _explain_unknown(field: str, path: str, request_type: type[msgspec.Struct]) -> InvalidRequest:
    param = f"{path}.{field}" if path else field
    known = [] if path else list(request_type.__struct_fields__)
    nearest = difflib.get_close_matches(field, known, n=1, cutoff=0.6)
    hint = f"; did you mean {nearest[0]}?" if nearest else "; remove it"
    return InvalidRequest(f"unknown field {param}{hint}", param=param)
