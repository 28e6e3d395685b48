"""One trace through proxy, prefill and decode instance, as a real collector receives it."""

from __future__ import annotations

import time
from contextlib import ExitStack

import httpx
from support.pd_processes import serving
from support.programs import TINY_LLAMA, running
from support.proxy_fakes_collector import collector


def test_instance_spans_are_children_of_proxy_spans() -> None:
    with collector() as kept, ExitStack() as stack:
        otlp = ("--otlp-endpoint", kept.url)
        prefill, decode = (
            stack.enter_context(serving(TINY_LLAMA, role, *otlp)) for role in ("prefill", "decode")
        )
        argv = ["--port", "0", "--prefill", prefill.url, "--decode", decode.url, *otlp]
        proxy = stack.enter_context(running("mooncake_proxy", *argv))
        url = proxy.wait_for("listens on").split()[-1]
        body = {"prompt": "Reading is a sprint", "max_tokens": 5, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        deadline = time.monotonic() + 60
        while len(kept.named("text_completion tiny-llama")) < 2 or not kept.named("attempt"):
            assert time.monotonic() < deadline, [span.name for span in kept.spans]
            time.sleep(0.1)
        first, second = kept.named("text_completion tiny-llama")[-2:]
        attempts = {span.span_id for span in kept.named("attempt")}
        assert {first.parent_span_id, second.parent_span_id} <= attempts
        assert len({span.trace_id for span in kept.spans}) == 1
        assert kept.children(first) == ["prefill", "queue"]
        assert kept.children(second) == ["decode", "kv_transfer", "queue"]
