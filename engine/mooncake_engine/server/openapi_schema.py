"""``GET /openapi.json``: the API as OpenAPI 3.1, built from its routes and request types.

Value ranges that the types can't express are in the documentation; a value out of range is a 400.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.routing import Route

from mooncake_api import COUNT_TOKENS_PATH
from mooncake_api.api_formats import API_FORMATS, MESSAGES
from mooncake_api.messages_request import CountTokensRequest
from mooncake_engine.server.openai_protocol import (
    AbortBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Json = dict[str, Any]

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort": AbortBody,
    **{path: each.request_type for path, each in API_FORMATS.items()},
    COUNT_TOKENS_PATH: CountTokensRequest,
}
"""The request type of each path that reads a body."""

_COMPONENT = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR = "MessagesError"


def openapi_schema(routes: Sequence[Route]) -> Json:
    """The OpenAPI document of an application with these routes."""
    _, components = msgspec.json.schema_components(BODIES.values(), ref_template=_COMPONENT)
    # Keys are token ids, which JSON writes as strings; msgspec omits their pattern.
    for name in ("CompletionRequest", "ChatRequest"):
        biases, _null = components[name]["properties"]["logit_bias"]["anyOf"]
        biases["propertyNames"] = {"pattern": "^-?[0-9]+$"}
    paths: dict[str, Json] = {}
    for route in routes:
        path = route.path_format
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mooncake-engine",
            "version": importlib.metadata.version("mooncake-engine"),
        },
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, _MESSAGES_ERROR: MESSAGES.error_schema}
        },
    }


def _operation(route: Route, path: str) -> Json:
    error = _MESSAGES_ERROR if path.startswith(MESSAGES.path) else "Error"
    found: Json = {
        "responses": {
            "200": {"description": "An answer; a stream of events where the request asks for one."},
            "default": {
                "description": "An error.",
                "content": {
                    "application/json": {"schema": {"$ref": _COMPONENT.format(name=error)}}
                },
            },
        }
    }
    if route.param_convertors:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if path in BODIES:
        schema = {"$ref": _COMPONENT.format(name=BODIES[path].__name__)}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return found
