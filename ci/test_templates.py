#!/usr/bin/env python3
"""Compares the server's rendering of 70 published chat templates with transformers'.

The templates come from the source distribution of llama-cpp-python (MIT), which is downloaded once.
Each renders conversations with and without system prompts, tools, tool results and thinking. Server
and transformers must render the same text, or both must reject the request. Exits 0 only if they
do, 77 if the templates can't be downloaded.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from jinja2 import TemplateError  # noqa: E402
from pinned_archive import fetch_archive  # noqa: E402
from support.asgi import AsgiClient  # noqa: E402  # the path is set above
from support.byte_tokenizer import write_byte_tokenizer  # noqa: E402
from support.fake_engine import FakeEngine  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from mooncake_engine.errors import ConfigError  # noqa: E402
from mooncake_engine.replay.prompt_tokenizer import PromptTokenizer  # noqa: E402
from mooncake_engine.server.app import create_app  # noqa: E402
from mooncake_engine.text.reasoning import detect_reasoning  # noqa: E402
from mooncake_engine.text.tokenizer import Tokenizer  # noqa: E402
from mooncake_engine.text.tool_call_forms import detect_parser  # noqa: E402

SOURCE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = ROOT / ".cache" / "chat-templates"
INSIDE = "/vendor/llama.cpp/models/templates/"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

ASK = {"role": "user", "content": "Is it raining in Paris?"}
SAY = {"role": "assistant", "content": "No."}
CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "content": '{"rain": false}'}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ASK]},
    "system": {"messages": [{"role": "system", "content": "Be <brief> & 'kind'."}, ASK]},
    "turns": {"messages": [ASK, SAY, ASK]},
    "tools": {"messages": [ASK], "tools": [TOOL]},
    "results": {"messages": [ASK, CALLED, RESULT], "tools": [TOOL]},
    "thinking": {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": True}},
    "not thinking": {"messages": [ASK], "chat_template_kwargs": {"enable_thinking": False}},
}


def main() -> int:
    """Compare template by template; returns the exit status."""
    if not FOLDER.is_dir() and not fetch():
        return 77
    paths = sorted(FOLDER.glob("*.jinja"))
    num_failed = 0
    for path in paths:
        template = path.read_text(encoding="utf-8")
        failures = list(differences(template))
        num_failed += bool(failures)
        form, thinks = detect_parser(template), detect_reasoning(template)
        found = f"tool calls {form or '-'}, reasoning {'yes' if thinks else '-'}"
        print(f"{'FAILED' if failures else 'ok    '}  {path.stem}: {found}", flush=True)
        for failure in failures:
            print(f"        {failure}")
    print(f"test-templates: {len(paths)} templates, {num_failed} differ")
    return int(bool(num_failed) or len(paths) < 70)


def fetch() -> bool:
    """Download the templates from the package index; returns whether that succeeded."""
    print(f"fetching {SOURCE} (77 MB, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        pip += ["--no-deps", "--no-binary", ":all:", "--dest", scratch]
        archive = fetch_archive(
            pip, SOURCE, Path(scratch), index="the package index", sha256=SHA256
        )
        if archive is None:
            return False
        FOLDER.mkdir(parents=True)
        with tarfile.open(archive) as members:
            for member in members:
                content = members.extractfile(member) if INSIDE in member.name else None
                if content is not None and member.name.endswith(".jinja"):
                    (FOLDER / Path(member.name).name).write_bytes(content.read())
    return True


def differences(template: str) -> Iterator[str]:
    """The cases that the server renders differently from transformers."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_byte_tokenizer(Path(folder), chat_template=template)
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | TOKENS))
        oracle = AutoTokenizer.from_pretrained(directory)
        roomy = replace(FakeEngine().info, max_model_len=1 << 20, vocab_size=1000)
        app = create_app(FakeEngine(info=roomy), Tokenizer.load(directory))
        for name, request in CASES.items():
            expected, found = rendered(oracle, request), laid_out(AsgiClient(app), request)
            if expected != found:
                yield f"{name}: {first_difference(expected, found)}"
        expected, bench = rendered(oracle, CASES["plain"]), as_bench(directory)
        if expected != bench:
            yield f"bench serve: {first_difference(expected, bench)}"


def rendered(oracle: Any, request: dict[str, Any]) -> str | None:
    """The text that transformers renders; None if the template rejects the request.

    Arguments of calls are passed as data, as templates expect. Nine templates fail on a call
    without content, which the server replaces with empty content.
    """
    found = _rendered(oracle, request)
    if found is not None:
        return found
    messages = [{**each, "content": each["content"] or ""} for each in request["messages"]]
    return _rendered(oracle, request | {"messages": messages})


def _rendered(oracle: Any, request: dict[str, Any]) -> str | None:
    messages = json.loads(json.dumps(request["messages"]))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    try:
        return str(
            oracle.apply_chat_template(
                messages,
                tools=request.get("tools"),
                tokenize=False,
                add_generation_prompt=True,
                **request.get("chat_template_kwargs", {}),
            )
        )
    except (TemplateError, TypeError, ValueError, KeyError):
        return None


def laid_out(client: AsgiClient, request: dict[str, Any]) -> str | None:
    """The text of the tokens that the server produces; None if it rejects the request."""
    response = client.post("/tokenize", **request)
    if response.status_code == 400:
        return None
    tokens = {"tokens": response.raise_for_status().json()["tokens"]}
    return str(client.post("/detokenize", **tokens).raise_for_status().json()["prompt"])


def as_bench(directory: Path) -> str | None:
    """The text that bench serve renders, which does not use transformers."""
    try:
        return PromptTokenizer.load(str(directory)).as_chat(ASK["content"])
    except ConfigError:
        return None


def first_difference(expected: str | None, found: str | None) -> str:
    """A short description of the first difference between two texts."""
    if expected is None or found is None:
        return "only the server refuses" if found is None else "only transformers refuses"
    pairs = zip(expected, found, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    shown = slice(max(start - 20, 0), start + 40)
    return f"wanted …{expected[shown]!r}, found …{found[shown]!r}"


if __name__ == "__main__":
    sys.exit(main())
