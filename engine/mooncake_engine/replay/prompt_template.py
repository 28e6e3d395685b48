"""Renders a chat template without transformers, with what transformers gives to templates.

Only for prompts of ``bench serve`` that go to a completions endpoint: instances lay out
conversations through transformers itself.
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
    """``{% generation %}``, which marks what the model said for training: here it means nothing."""

    tags = {"generation"}  # noqa: RUF012  # of instances in jinja2

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_user_message(template: str, content: str, special_texts: Mapping[str, str]) -> str:
    """A conversation of one message, up to where the model answers.

    Args:
        template: of the model.
        content: of the message.
        special_texts: ``bos_token`` and its like.

    Raises:
        ConfigError: the template refuses the message, or can't be read.
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
