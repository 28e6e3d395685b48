"""Renders a chat template without transformers, with the same filters and functions that
transformers offers to templates.

Only ``bench serve`` uses this, for prompts that it sends to a completions endpoint. Instances
render conversations with transformers itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mooncake_engine.errors import ConfigError


class _Generation(Extension):
    """Accepts ``{% generation %}``, which marks the model's own text for training, and ignores
    it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_user_message(template: str, content: str, special_texts: Mapping[str, str]) -> str:
    """Render a conversation of one user message, up to the start of the model's answer.

    Args:
        template: the model's chat template.
        content: the text of the message.
        special_texts: special tokens by their variable name, such as ``bos_token``.

    Raises:
        ConfigError: the template is invalid or rejects the message.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    messages = [{"role": "user", "content": content}]
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, tools=None, documents=None,
            **special_texts,
        )  # fmt: skip
    except (TemplateError, TypeError, ValueError, KeyError) as exc:
        raise ConfigError(f"the chat template can't be rendered: {exc}") from exc


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
