"""A proxy with a tokenizer sends token ids to instances whose tokenizer produces the same ids."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post
from support.sglang_pair import sglang_deployment

from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.config import AdmissionConfig
from mooncake_proxy.routing.prefix_index import Tokenizer, load_tokenizer
from mooncake_proxy.routing.prompt_tokens import PROBE, PromptTokens

MODEL = str(Path(__file__).resolve().parents[3] / "examples" / "tiny-llama")
TEXT = "Once upon a time there was a proxy. " * 4
WITH_TOKENIZER = {"prefill_policy": "prefix", "tokenizers": {"": MODEL}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


async def agree(s: FakeDeployment) -> None:
    """Send one request, and wait until all instances have answered the tokenizer probe."""
    tokens = s.app.router.prompt_tokens
    assert tokens is not None
    for _ in range(200):
        if tokens.are_accepted or None not in tokens._agrees.values():
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("flow", ["pull", "push"])
def test_both_instances_receive_ids_instead_of_text(flow: str, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with fake_deployment(**WITH_TOKENIZER, flow=flow) as s:
            for fake in (s.prefill, s.decode):
                fake.behaviour.tokens = tokenizer.encode(PROBE, add_special_tokens=True)
            await agree(s)
            answer = await post(s, BODY | {"prompt": TEXT})
            assert answer.status_code == 200
            ids = tokenizer.encode(TEXT, add_special_tokens=True)
            for fake in (s.prefill, s.decode):
                assert fake.generated[-1].body["prompt"] == ids
            plain = await post(s, BODY | {"prompt": TEXT, "add_special_tokens": False})
            assert plain.status_code == 200
            assert s.decode.generated[-1].body["prompt"] == tokenizer.encode(TEXT)

    uvloop.run(main())


def test_refused_request_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized = []
    encode = PromptTokens.encode

    def counted(self: PromptTokens, context: RequestContext, text: str) -> list[int]:
        tokenized.append(text)
        return encode(self, context, text)

    async def main() -> None:
        admission = AdmissionConfig(max_running=1, max_waiting=0)
        async with fake_deployment(**WITH_TOKENIZER, admission=admission) as s:
            await agree(s)
            s.prefill.behaviour.hangs = True
            running = asyncio.ensure_future(post(s, BODY))
            for _ in range(1000):
                if s.prefill.generated:
                    break
                await asyncio.sleep(0.01)
            refused = await post(s, BODY | {"prompt": TEXT})
            assert refused.status_code == 429
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr(PromptTokens, "encode", counted)
    uvloop.run(main())
    assert tokenized == [BODY["prompt"]]


def test_sglang_pair_receives_ids(tokenizer: Tokenizer) -> None:
    """SGLang's ``/v1/completions`` accepts ids as a prompt, and its ``/tokenize`` responds as
    vLLM's."""

    async def main() -> None:
        async with sglang_deployment(**WITH_TOKENIZER) as s:
            for fake in (s.prefill, s.decode):
                fake.behaviour.tokens = tokenizer.encode(PROBE, add_special_tokens=True)
            await agree(s)
            assert (await post(s, BODY | {"prompt": TEXT})).status_code == 200
            [prefilled], [decoded] = s.prefill.generated, s.decode.generated
            ids = tokenizer.encode(TEXT, add_special_tokens=True)
            assert prefilled.body["prompt"] == decoded.body["prompt"] == ids
            assert prefilled.body["bootstrap_room"] == decoded.body["bootstrap_room"]

    uvloop.run(main())


def test_instance_with_another_tokenizer_receives_text(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with fake_deployment(**WITH_TOKENIZER) as s:
            s.prefill.behaviour.tokens = tokenizer.encode(PROBE, add_special_tokens=True)
            s.decode.behaviour.tokens = [1, 2, 3]
            await agree(s)
            assert (await post(s, BODY | {"prompt": TEXT})).status_code == 200
            for fake in (s.prefill, s.decode):
                assert fake.generated[-1].body["prompt"] == TEXT

    uvloop.run(main())


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt": [5, 6, 7]}])
def test_prompt_that_ids_cannot_express_is_forwarded_unchanged(
    fields: dict[str, object], tokenizer: Tokenizer
) -> None:
    async def main() -> None:
        async with fake_deployment(**WITH_TOKENIZER) as s:
            for fake in (s.prefill, s.decode):
                fake.behaviour.tokens = tokenizer.encode(PROBE, add_special_tokens=True)
            await agree(s)
            body = BODY | {"prompt": TEXT} | fields
            assert (await post(s, body)).status_code == 200
            assert s.decode.generated[-1].body["prompt"] == body["prompt"]

    uvloop.run(main())
