"""The prefill and decode halves of an answer, as the proxy sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.asgi import AsgiClient, Json, ManualClient
from support.fake_engine import EOS, FakeEngine, text_script

from mooncake_engine.messages import EngineRequest, FinishReason, TokenUpdate
from mooncake_engine.server.app import create_app
from mooncake_engine.server.kv_transfer_requests import read_kv_transfer_request
from mooncake_engine.text.completion_output import OnUpdate
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.params import NO_KV_TRANSFER, InstanceAddress, build_reservation_params

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FORMS: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.fixture
def tokenizer(byte_tokenizer: Tokenizer) -> Tokenizer:
    return byte_tokenizer


def serve(engine: FakeEngine, tokenizer: Tokenizer) -> AsgiClient:
    return AsgiClient(create_app(engine, tokenizer), {"X-Request-Id": "req-1"})


def prefill(client: AsgiClient, path: str, body: Json) -> Json:
    """The parameters that the proxy sends to P."""
    body = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}
    response = client.post(path, **body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def decode_params(answer: Json, tokens: list[int], *, delivered: bool) -> Json:
    """The parameters as the proxy forwards them, with what the core adds."""
    params: Json = answer["kv_transfer_params"] | {"first_token_delivered": delivered}
    params["last_token_id"] = tokens[0]
    for choice, token in zip(params.get("choices", []), tokens, strict=False):
        choice["last_token_id"] = token
    return params


def text(choice: Json) -> str:
    if "delta" in choice:
        return str(choice["delta"].get("content", ""))
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def test_prefill_returns_the_first_token_and_params(tokenizer: Tokenizer) -> None:
    client = serve(FakeEngine(text_script("tea"), num_cached_tokens=1), tokenizer)
    answer = prefill(client, "/v1/completions", {"prompt": "hi"})
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("t", "length")
    assert answer["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "fake-engine",
        "remote_request_id": "req-1",
        "remote_host": "127.0.0.1",
        "remote_port": 4242,
        "remote_block_ids": [[0, 1]],
        "remote_block_size": 16,
        "num_prompt_tokens": 2,
        "created": answer["created"],
        "remote_cached_tokens": 1,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "prompt_token_ids": [104, 105],
    }


@pytest.mark.parametrize(("path", "body"), FORMS)
@pytest.mark.parametrize("said", ["tea", "é!", "ENDLESS"])
def test_a_stream_continues_where_the_prefill_ended(
    tokenizer: Tokenizer, path: str, body: Json, said: str
) -> None:
    body = body | {"stop": ["ENDE"], "max_tokens": 99}
    whole = serve(FakeEngine(text_script(said)), tokenizer).stream(path, **body)
    answer = prefill(serve(FakeEngine(text_script(said)), tokenizer), path, body)
    params = decode_params(answer, [said.encode()[0]], delivered=True)
    decode = serve(FakeEngine(text_script(said)), tokenizer)
    chunks = decode.stream(path, **body, kv_transfer_params=params)
    assert {chunk["id"] for chunk in chunks} == {answer["id"]}
    assert {chunk["created"] for chunk in chunks} == {answer["created"]}
    assert all("role" not in chunk["choices"][0].get("delta", {}) for chunk in chunks)
    parts = [text(answer["choices"][0]), *(text(chunk["choices"][0]) for chunk in chunks)]
    assert "".join(parts) == "".join(text(chunk["choices"][0]) for chunk in whole) == said


def test_the_first_tokens_logprobs_are_not_repeated(tokenizer: Tokenizer) -> None:
    body = {"prompt": "hi", "logprobs": 0}
    answer = prefill(serve(FakeEngine(text_script("tea")), tokenizer), "/v1/completions", body)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["t"]
    params = decode_params(answer, [ord("t")], delivered=True)
    decode = serve(FakeEngine(text_script("tea")), tokenizer)
    chunks = decode.stream("/v1/completions", **body, kv_transfer_params=params)
    tokens = [token for c in chunks for token in c["choices"][0]["logprobs"]["tokens"]]
    offsets = [offset for c in chunks for offset in c["choices"][0]["logprobs"]["text_offset"]]
    assert tokens == ["e", "a", "<|eos|>"]
    assert offsets == [1, 2, 3]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_usage_counts_both_halves(tokenizer: Tokenizer, path: str, body: Json) -> None:
    engine = FakeEngine(text_script("tea"), num_cached_tokens=1)
    answer = prefill(serve(engine, tokenizer), path, body)
    for delivered in (False, True):
        params = decode_params(answer, [ord("t")], delivered=delivered)
        chunks = serve(FakeEngine(text_script("tea")), tokenizer).stream(
            path, **body, kv_transfer_params=params, stream_options={"include_usage": True}
        )
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == len("tea") + 1
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_a_complete_answer_has_the_first_token(tokenizer: Tokenizer, path: str, body: Json) -> None:
    answer = prefill(serve(FakeEngine(text_script("tea")), tokenizer), path, body)
    params = decode_params(answer, [ord("t")], delivered=False)
    whole = serve(FakeEngine(text_script("tea")), tokenizer).post(
        path, **body, kv_transfer_params=params
    )
    assert text(whole.json()["choices"][0]) == "tea"
    assert "kv_transfer_params" not in whole.json()


def test_a_first_token_of_eos_ends_the_request(tokenizer: Tokenizer) -> None:
    answer = prefill(
        serve(FakeEngine(text_script("")), tokenizer), "/v1/completions", {"prompt": "hi"}
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["kv_transfer_params"] is None


def test_a_stop_string_in_the_first_token_ends_request_and_lease(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("tea"))
    answer = prefill(serve(engine, tokenizer), "/v1/completions", {"prompt": "hi", "stop": ["t"]})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "t"
    assert answer["kv_transfer_params"] is None
    assert engine.aborted == ["req-1"]


@pytest.mark.parametrize("is_gone", [True, False], ids=["client leaves", "third answer fails"])
def test_leases_of_an_unfinished_prefill_are_released(
    tokenizer: Tokenizer, *, is_gone: bool
) -> None:
    """Two of three choices are prefilled and held for a peer when the request ends."""
    engine = FakeEngine(text_script("tea", "tea", "tea"), hold_at=0, held_ids="-2")
    engine.die_at = None if is_gone else 0
    body = b'{"prompt":"hi","n":3,"max_tokens":2,"kv_transfer_params":{"do_remote_decode":true}}'

    async def leave() -> None:
        leaving = ManualClient(body, headers=[(b"x-request-id", b"req-1")])
        app = create_app(engine, tokenizer)
        serving = asyncio.ensure_future(app(leaving.scope, leaving.receive, leaving.send))
        await engine.held.wait()
        for _ in range(20):  # the other choices continue meanwhile
            await asyncio.sleep(0)
        (leaving.gone if is_gone else engine.release).set()
        await serving

    asyncio.run(leave())
    assert sorted(engine.aborted) == ["req-1-0", "req-1-1"]


class OneStepEngine(FakeEngine):
    """An engine that ends three requests in one step: the first of them fails."""

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        failed = TokenUpdate(request.request_id, finish=FinishReason.ERROR, error="bad luck")
        update = self._updates(request)[0] if self.seen else failed
        asyncio.get_running_loop().call_soon(on_update, update)
        self.seen.append(request)
        return request.request_id


def test_leases_of_the_step_in_which_another_choice_fails_are_released(
    tokenizer: Tokenizer,
) -> None:
    engine = OneStepEngine(text_script("tea", "tea", "tea"))
    asked = {"prompt": "hi", "n": 3, "kv_transfer_params": {"do_remote_decode": True}}
    response = serve(engine, tokenizer).post("/v1/completions", **asked)
    assert response.json()["error"]["message"] == "bad luck"
    assert sorted(engine.aborted) == ["req-1-1", "req-1-2"]


@pytest.mark.parametrize(("path", "body"), FORMS)
@pytest.mark.parametrize(
    ("fields", "min_tokens"),
    [
        # What llm-d's routing sidecar and vLLM-Ascend's proxies send to a prefill instance: the
        # client's own number as far as version 0.9 of the one, 1 for every request from the others.
        ({"min_tokens": 5}, 1),
        ({"min_tokens": 1}, 1),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, 0),
        ({}, 0),
    ],
)
def test_min_tokens_of_a_router_do_not_refuse_a_prefill(
    tokenizer: Tokenizer, path: str, body: Json, fields: Json, min_tokens: int
) -> None:
    engine = FakeEngine(text_script("tea"))
    prefill(serve(engine, tokenizer), path, body | fields)
    assert engine.seen[0].sampling.min_tokens == min_tokens


def test_a_different_tokenizer_is_rejected(tokenizer: Tokenizer) -> None:
    params = {"do_remote_prefill": True, "tokenizer_fingerprint": "another"}
    client = serve(FakeEngine(), tokenizer)
    response = client.post("/v1/completions", prompt="hi", kv_transfer_params=params)
    assert response.status_code == 400
    assert "serve the same model directory on both" in response.json()["error"]["message"]


@pytest.mark.parametrize("params", [{}, None, {"do_remote_decode": False}, {"unknown": 1}])
def test_params_without_a_transfer(tokenizer: Tokenizer, params: Any) -> None:
    engine = FakeEngine()
    client = serve(engine, tokenizer)
    answer = client.post("/v1/completions", prompt="hi", kv_transfer_params=params).json()
    assert answer["choices"][0]["text"] == "HI"
    assert engine.seen[0].kv_transfer_params == NO_KV_TRANSFER
    assert "kv_transfer_params" not in answer


@pytest.mark.parametrize("delivered", [False, True])
@pytest.mark.parametrize("said", [("one", "two"), ("", "two"), ("one", "")])
def test_several_choices_are_transferred_one_by_one(
    tokenizer: Tokenizer, said: tuple[str, str], delivered: bool
) -> None:
    """Also if one of them finishes with its first token."""
    body: Json = {"prompt": "hi", "n": 2, "logprobs": 0, "return_token_ids": True}
    answer = prefill(serve(FakeEngine(text_script(*said)), tokenizer), "/v1/completions", body)
    tokens = [[*each.encode(), EOS][0] for each in said]
    params = decode_params(answer, tokens, delivered=delivered)
    assert len(params["choices"]) == 2
    decode = serve(FakeEngine(text_script(*said)), tokenizer)
    texts = {c["index"]: c["text"] if delivered else "" for c in answer["choices"]}
    ends = {}
    ids: dict[int, list[int]] = {0: [], 1: []}
    for chunk in decode.stream("/v1/completions", **body, kv_transfer_params=params):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
        ids[choice["index"]] += choice.get("token_ids", [])
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == dict(enumerate(said))
    assert ends == {0: "stop", 1: "stop"}
    assert ids == {i: [*each.encode(), EOS] for i, each in enumerate(said)}


def test_all_choices_finish_with_their_first_token(tokenizer: Tokenizer) -> None:
    body = {"prompt": "hi", "n": 2}
    answer = prefill(serve(FakeEngine(text_script("", "")), tokenizer), "/v1/completions", body)
    assert answer["kv_transfer_params"] is None
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]


def test_an_invalid_finished_update_is_rejected(tokenizer: Tokenizer) -> None:
    entry = {"do_remote_prefill": False, "finished_update": {"token_ids": "x"}}
    params = {"do_remote_prefill": True, "choices": [entry, entry]}
    client = serve(FakeEngine(), tokenizer)
    response = client.post("/v1/completions", prompt="hi", n=2, kv_transfer_params=params)
    assert response.status_code == 400
    assert "finished_update" in response.json()["error"]["message"]


def vllm_params(**more: Any) -> Json:
    """What vLLM's P returns for a prompt of two tokens: one lease, and a token without details."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "vllm",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": 4242,
        "remote_block_ids": [[0]],
        "num_prompt_tokens": 2,
        "last_token_id": ord("x"),
        "remote_cached_tokens": 0,
        "decode_continues_prompt": True,
        **more,
    }


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [path for path, _ in FORMS])
def test_several_choices_sample_their_own_tokens_from_one_prefill(
    tokenizer: Tokenizer, path: str, *, is_streamed: bool
) -> None:
    engine = FakeEngine(text_script("one", "two"))
    client = serve(engine, tokenizer)
    is_chat = "chat" in path
    body: Json = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    params = vllm_params(first_token_delivered=False)
    if is_chat:  # the template adds tokens
        del params["num_prompt_tokens"]
    body |= {"n": 2, "kv_transfer_params": params}
    if is_streamed:
        chunks = [chunk["choices"][0] for chunk in client.stream(path, **body)]
        said = ["".join(text(c) for c in chunks if c["index"] == i) for i in range(2)]
    else:
        said = [text(choice) for choice in client.post(path, **body).json()["choices"]]
    assert said == ["one", "two"]
    first, second = engine.seen
    assert first.group == second.group is not None
    assert first.kv_transfer_params.remote is not None
    assert first.kv_transfer_params.first_token is None
    assert second.kv_transfer_params == NO_KV_TRANSFER


@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize("delivered", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_a_first_token_without_log_probabilities_is_sampled_again_if_they_are_wanted(
    tokenizer: Tokenizer, *, asks: bool, delivered: bool, has_logprobs: bool
) -> None:
    """Unless the client has already received the token with its log probabilities."""
    engine = FakeEngine(text_script("xyz"))
    params = vllm_params(first_token_delivered=delivered)
    if has_logprobs:
        params["last_token_logprobs"] = [-0.5, []]
    body = {"prompt": "hi", "logprobs": 0} if asks else {"prompt": "hi"}
    client = serve(engine, tokenizer)
    answer = client.post("/v1/completions", **body, kv_transfer_params=params)
    assert answer.status_code == 200, answer.text
    [asked] = engine.seen
    is_taken = asked.kv_transfer_params.first_token is not None
    assert is_taken == (delivered or has_logprobs or not asks)
    assert asked.kv_transfer_params.remote is not None


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_lists_of_log_probabilities_are_as_long_as_the_answer(
    tokenizer: Tokenizer, path: str, body: Json
) -> None:
    is_chat = "chat" in path
    params = vllm_params(first_token_delivered=False)
    del params["num_prompt_tokens"]
    asked = body | {"logprobs": True, "top_logprobs": 1} if is_chat else body | {"logprobs": 1}
    client = serve(FakeEngine(text_script("xyz")), tokenizer)
    answer = client.post(path, **asked, kv_transfer_params=params).json()
    found = answer["choices"][0]["logprobs"]
    if is_chat:
        assert [entry["token"] for entry in found["content"]] == ["x", "y", "z", "<|eos|>"]
        return
    assert found["tokens"] == ["x", "y", "z", "<|eos|>"]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == 4


class CountingTokenizer:
    """A tokenizer that counts the calls of ``encode``."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.num_encoded = 0

    def encode(self, text: str, **options: Any) -> tuple[int, ...]:
        self.num_encoded += 1
        return self._inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_a_prompt_is_tokenised_once(path: str, body: Json, tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("abc"))
    counting = CountingTokenizer(tokenizer)
    client = serve(engine, counting)  # type: ignore[arg-type]  # counts calls
    answer = prefill(client, path, body)
    made = answer["kv_transfer_params"]["prompt_token_ids"]
    assert made == list(engine.seen[-1].prompt_token_ids)
    before = counting.num_encoded
    params = decode_params(answer, [ord("a")], delivered=True)
    response = client.post(path, **body, max_tokens=3, kv_transfer_params=params)
    assert response.status_code == 200, response.text
    assert counting.num_encoded == before
    assert list(engine.seen[-1].prompt_token_ids) == made


def test_a_prompt_of_token_ids_is_not_sent_back(tokenizer: Tokenizer) -> None:
    client = serve(FakeEngine(text_script("abc")), tokenizer)
    answer = prefill(client, "/v1/completions", {"prompt": [104, 105]})
    assert "prompt_token_ids" not in answer["kv_transfer_params"]


@pytest.mark.parametrize("ids", ["no list", [1, "x"], [10**9]])
def test_invalid_token_ids_of_a_peer_are_rejected(ids: Any, tokenizer: Tokenizer) -> None:
    client = serve(FakeEngine(text_script("abc")), tokenizer)
    answer = prefill(client, "/v1/completions", {"prompt": "hi"})
    params = decode_params(answer, [ord("a")], delivered=True) | {"prompt_token_ids": ids}
    response = client.post("/v1/completions", prompt="hi", kv_transfer_params=params)
    assert response.status_code == 400, response.text


def test_prefix_sources_go_to_every_choice_of_a_local_request() -> None:
    sources = [{"host": "10.0.0.1", "port": 7701, "epoch": "abc", "num_tokens": 512}]
    given = {"prefix_sources": sources, "finished_update": {"anything": 1}}
    found = read_kv_transfer_request(given, 2, stream=True)
    assert not found.is_outgoing
    assert not found.is_incoming
    assert [found.params(index) for index in range(2)] == [{"prefix_sources": sources}] * 2
    assert found.finished_update(0) is None


RESERVE = {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:1/v1/metaserver/k"}


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_the_prefill_instance_receives_the_decode_instances_token_ids(
    tokenizer: Tokenizer, path: str, body: Json
) -> None:
    engine = FakeEngine(text_script("abc"))
    serve(engine, tokenizer).post(path, **body, kv_transfer_params=RESERVE)
    [asked] = engine.seen
    assert asked.kv_transfer_params.tokenizer == tokenizer.fingerprint
    post = build_reservation_params(
        InstanceAddress("d", "127.0.0.1", 4242, 1, 16, 30.0),
        asked.request_id,
        [0, 1],
        asked.prompt_token_ids,
        0,
        tokenizer=asked.kv_transfer_params.tokenizer,
    )
    counting = CountingTokenizer(tokenizer)
    prefill_engine = FakeEngine(text_script("abc"))
    client = serve(prefill_engine, counting)  # type: ignore[arg-type]  # counts calls
    before = counting.num_encoded
    answer = client.post(path, **body, max_tokens=1, stream=False, kv_transfer_params=post)
    assert answer.status_code == 200, answer.text
    assert counting.num_encoded == before
    assert prefill_engine.seen[-1].prompt_token_ids == asked.prompt_token_ids


def test_token_ids_of_a_client_are_not_forwarded(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("abc"))
    body = {"prompt": [104, 105]}
    serve(engine, tokenizer).post("/v1/completions", **body, kv_transfer_params=RESERVE)
    assert engine.seen[-1].kv_transfer_params.tokenizer == ""
    address = InstanceAddress("d", "127.0.0.1", 4242, 1, 16, 30.0)
    assert "prompt_token_ids" not in build_reservation_params(address, "r", [0], [104, 105], 0)
