"""A decode instance is lost while it streams: its streams are migrated to another one and continue
at the same token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
from support.pd_processes import Served, serving
from support.programs import TINY_LLAMA, running

PAGE = (TINY_LLAMA / "page.txt").read_text()
NUM_STREAMS, NUM_TOKENS, NUM_BEFORE = 6, 400, 40
FLOWS = {"pull": (), "push": ("--kv-connector", "MooncakeLayerwiseConnector")}


@dataclass(frozen=True)
class Deployment:
    """A proxy that migrates streams, in front of one P and two D's."""

    url: str
    decodes: list[Served]

    def stream(self, number: int, is_chat: bool, progress: list[int]) -> str:
        """The tokens that one client receives; counts the events received so far."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=90)
        limits = {"max_tokens": NUM_TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        text = PAGE[30 * number : 30 * number + 200]
        text_so_far = ""
        if is_chat:
            messages = [{"role": "user", "content": text}]
            chunks = client.chat.completions.create(
                model="tiny-llama", messages=messages, stream=True, **limits
            )
            pieces = (chunk.choices[0].delta.content for chunk in chunks)
        else:
            texts = client.completions.create(
                model="tiny-llama", prompt=text, stream=True, **limits
            )
            pieces = (chunk.choices[0].text for chunk in texts)
        for piece in pieces:
            text_so_far += piece or ""
            progress[number] += 1
        return text_so_far

    def stream_all(self, begun: threading.Event | None = None) -> list[str]:
        """The tokens that all clients receive; sets the event when each has a part of its
        answer."""
        progress = [0] * NUM_STREAMS
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            answers = [
                threads.submit(self.stream, number, number % 2 == 1, progress)
                for number in range(NUM_STREAMS)
            ]
            while begun is not None and not begun.is_set():
                if min(progress) >= NUM_BEFORE or any(answer.done() for answer in answers):
                    begun.set()
            return [answer.result() for answer in answers]


@contextmanager
def deployed(flow: str) -> Iterator[Deployment]:
    with ExitStack() as stack:
        options = (*FLOWS[flow], "--num-kv-blocks", "512", "--dtype", "float32")
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
        begun = threading.Event()
        answers = threads.submit(deployment.stream_all, begun)
        assert begun.wait(60)
        deployment.decodes[0].kill()
        assert answers.result() == wanted
        lines = httpx.get(f"{deployment.url}/metrics").text.splitlines()
        [migrated] = [line for line in lines if line.startswith("mooncake_proxy_migrated_total")]
        assert 1 <= float(migrated.split()[-1]) < NUM_STREAMS
