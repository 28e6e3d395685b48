"""Prefix affinity over real sockets: a prompt goes to the instance that prefilled its prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.proxy_fakes import FakeDeployment, fake_deployment
from support.proxy_fakes_client import BODY, post

from mooncake_proxy.routing.prefix_index import load_tokenizer

MODEL = str(Path(__file__).parents[3] / "examples" / "tiny-llama")
PAGE = (Path(MODEL) / "page.txt").read_text("utf-8")
OTHER = PAGE[::-1]


async def prefillers(s: FakeDeployment, prompt: str | list[int], times: int) -> set[str]:
    """The instances that prefilled these prompts."""
    before = {fake.name: len(fake.generated) for fake in s.prefills}
    for _ in range(times):
        assert (await post(s, BODY | {"prompt": prompt})).status_code == 200
    return {fake.name for fake in s.prefills if len(fake.generated) > before[fake.name]}


@pytest.mark.parametrize("tokenizer", [None, MODEL], ids=["bytes", "tokens"])
@pytest.mark.parametrize("prompt", [PAGE, PAGE[:600], [7] * 900], ids=["long", "short", "ids"])
def test_same_prefix_goes_to_same_instance(prompt: Any, tokenizer: str | None) -> None:
    async def main() -> None:
        async with fake_deployment(
            num_prefills=3,
            prefill_policy="prefix",
            tokenizers={"": str(tokenizer)} if tokenizer else {},
        ) as s:
            [home] = await prefillers(s, prompt, 1)
            more = prompt + (" and more" if isinstance(prompt, str) else [8, 9])
            assert await prefillers(s, more, 12) == {home}

    uvloop.run(main())


def test_text_and_token_ids_share_affinity() -> None:
    async def main() -> None:
        async with fake_deployment(
            num_prefills=3, prefill_policy="prefix", tokenizers={"": str(MODEL)}
        ) as s:
            [home] = await prefillers(s, PAGE, 1)
            assert await prefillers(s, list(load_tokenizer(MODEL).encode(PAGE)), 12) == {home}
            assert await prefillers(s, OTHER, 1)

    uvloop.run(main())


@pytest.mark.parametrize("sent_in", ["header", "user"])
def test_session_stays_on_its_instance(sent_in: str) -> None:
    async def main() -> None:
        async with fake_deployment(num_prefills=3, num_decodes=3, prefill_policy="session") as s:
            homes = set()
            for session in ("anna", "bert", "cleo", "dora", "emil", "fred"):
                headers = {"x-session-id": session} if sent_in == "header" else {}
                body = BODY | ({"user": session} if sent_in == "user" else {})
                before = {fake.name: len(fake.generated) for fake in s.prefills}
                async with httpx.AsyncClient(base_url=s.url, headers=headers) as client:
                    for _ in range(4):
                        assert (await client.post("/v1/completions", json=body)).is_success
                [home] = [f.name for f in s.prefills if len(f.generated) > before[f.name]]
                homes.add(home)
            assert len(homes) > 1

    uvloop.run(main())


def test_prefix_cached_by_another_key_is_ignored() -> None:
    async def main() -> None:
        keys = frozenset({"a", "b"})
        settings = {"prefill_policy": "prefix", "decode_policy": "prefix"}
        async with fake_deployment(
            api_keys=keys, cache_salt_per_key=True, short_prompt_tokens=100, **settings
        ) as s:
            for key in ("a", "a", "b"):
                headers = {"authorization": f"Bearer {key}"}
                async with httpx.AsyncClient(base_url=s.url, headers=headers) as client:
                    await client.post("/v1/completions", json=BODY | {"prompt": PAGE})
            assert len(s.prefill.generated) == 2, "the second one of a is short, that of b is not"

    uvloop.run(main())
