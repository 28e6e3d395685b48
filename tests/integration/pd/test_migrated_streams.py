"""A decode instance is lost while it streams: its streams are migrated to another one and continue
at the same token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from support.pd_processes import Served, serving
from support.programs import TINY_LLAMA, running

PAGE = (TINY_LLAMA / "page.txt").read_text()
NUM_BEFORE = 40
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = LONG | {"temperature": 1.0, "seed": 5}
ENDING: dict[str, Any] = {"max_tokens": 500, "temperature": 0}
LETTERS: dict[str, Any] = {
    "type": "object",
    "properties": {"letters": {"type": "string", "pattern": "^[a-z]{300}$"}},
    "required": ["letters"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "write", "parameters": LETTERS}}
NO_SPACE = {str(byte): -100 for byte in b" \n\r\t\\"}
COMPLETIONS: list[dict[str, Any]] = [
    LONG,
    SAMPLED | {"frequency_penalty": 0.7, "bad_words": [" the"], "logprobs": 1},
    ENDING | {"structured_outputs": {"regex": "[a-z]{3}( [a-z]{3}){120}"}},
]
CHATS: list[dict[str, Any]] = [
    LONG | {"stop": ["neverever"]},
    SAMPLED | {"logprobs": True, "top_logprobs": 1, "repetition_penalty": 1.1},
    ENDING | {"tools": [TOOL], "tool_choice": "required", "logit_bias": NO_SPACE},
]
NUM_STREAMS = len(COMPLETIONS) + len(CHATS)
FLOWS = {"pull": (), "push": ("--kv-connector", "MooncakeLayerwiseConnector")}


def shown(choice: Any) -> str:
    """What a chunk adds to the answer."""
    if hasattr(choice, "text"):
        tokens = [] if choice.logprobs is None else choice.logprobs.tokens
        return f"{choice.text}{tokens}"
    tokens = [] if choice.logprobs is None else [each.token for each in choice.logprobs.content]
    calls = [call.function.arguments for call in choice.delta.tool_calls or ()]
    return f"{choice.delta.content or ''}{''.join(calls)}{tokens}"


@dataclass(frozen=True)
class Deployment:
    """A proxy that migrates streams, in front of one P and two D's."""

    url: str
    decodes: list[Served]

    def stream(self, number: int, progress: list[int]) -> tuple[str, str]:
        """The answer that one client receives, and why it ends; counts the events so far."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=90)
        kind, is_chat = divmod(number, 2)
        body = (CHATS if is_chat else COMPLETIONS)[kind]
        text = PAGE[30 * number : 30 * number + 200]
        chunks: Any
        if is_chat:
            messages: Any = [{"role": "user", "content": text}]
            chunks = client.chat.completions.create(
                model="tiny-llama", messages=messages, stream=True, extra_body=body
            )
        else:
            chunks = client.completions.create(
                model="tiny-llama", prompt=text, stream=True, extra_body=body
            )
        answer, finish = "", ""
        for chunk in chunks:
            [choice] = chunk.choices
            answer += shown(choice)
            finish = choice.finish_reason or finish
            progress[number] += 1
        return answer, finish

    def stream_all(self, begun: threading.Event | None = None) -> list[tuple[str, str]]:
        """The answers that all clients receive; sets the event when each has a part of its
        answer."""
        progress = [0] * NUM_STREAMS
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            answers = [
                threads.submit(self.stream, number, progress) for number in range(NUM_STREAMS)
            ]
            while begun is not None and not begun.is_set():
                if min(progress) >= NUM_BEFORE or any(answer.done() for answer in answers):
                    begun.set()
            return [answer.result() for answer in answers]


@contextmanager
def deployed(flow: str) -> Iterator[Deployment]:
    with ExitStack() as stack:
        options = (*FLOWS[flow], "--num-kv-blocks", "512", "--dtype", "float32")
        options += ("--tool-call-parser", "hermes")
        prefill = stack.enter_context(serving(TINY_LLAMA, "prefill", *options))
        decodes = [stack.enter_context(serving(TINY_LLAMA, "decode", *options)) for _ in range(2)]
        argv = ["--port", "0", "--prefill", prefill.url, "--flow", flow, "--migrate-streams"]
        argv += [word for each in decodes for word in ("--decode", each.url)]
        proxy = stack.enter_context(running("mooncake_proxy", *argv))
        yield Deployment(proxy.wait_for("listens on").split()[-1], decodes)


@pytest.mark.parametrize("flow", list(FLOWS))
def test_streams_of_lost_decoder_are_migrated(flow: str) -> None:
    with deployed(flow) as deployment, ThreadPoolExecutor(1) as threads:
        wanted = deployment.stream_all()
        assert [finish for _, finish in wanted] == ["length", "length"] * 2 + ["stop", "tool_calls"]
        begun = threading.Event()
        answers = threads.submit(deployment.stream_all, begun)
        assert begun.wait(60)
        deployment.decodes[0].kill()
        assert answers.result() == wanted
        lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
        [migrated] = [line for line in lines if line.startswith("mooncake_proxy_migrated_total")]
        assert 1 <= float(migrated.split()[-1]) < NUM_STREAMS
