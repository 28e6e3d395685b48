"""``/v1/completions``: every form of prompt and answer."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import AsgiClient
from support.fake_engine import EOS, FakeEngine, text_script

PATH = "/v1/completions"


def test_answers_in_openais_form(client: AsgiClient) -> None:
    response = client.post(PATH, model="fake", prompt="tea")
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "req-1"
    answer = response.json()
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "cmpl-req-1",
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "TEA",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("tea", ["TEA"]),
        (["tea", "no"], ["TEA", "NO"]),
        (list(b"tea"), ["TEA"]),
        ([list(b"tea"), list(b"no")], ["TEA", "NO"]),
    ],
)
def test_accepts_every_form_of_prompt(client: AsgiClient, prompt: Any, texts: list[str]) -> None:
    answer = client.post(PATH, prompt=prompt).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == len("".join(texts))


def test_max_tokens_is_16_unless_given(client: AsgiClient) -> None:
    choice = client.post(PATH, prompt="x" * 40).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("X" * 16, "length")
    choice = client.post(PATH, prompt="x" * 40, max_tokens=3).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("XXX", "length")


def test_max_tokens_ends_with_the_context(client: AsgiClient, engine: FakeEngine) -> None:
    client.post(PATH, prompt="x" * 250, max_tokens=1000)
    assert engine.seen[0].sampling.max_tokens == 256 - 250


def test_streams_every_token(client: AsgiClient) -> None:
    chunks = client.stream(PATH, prompt="tea")
    assert {chunk["id"] for chunk in chunks} == {"cmpl-req-1"}
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["T", "E", "A", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert "usage" not in chunks[0]


def test_streams_usage_if_requested(client: AsgiClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 2
    chunks = client.stream(PATH, prompt="tea", stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_every_chunk_may_have_usage(client: AsgiClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.stream(PATH, prompt="tea", stream_options=options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "TEA"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 4]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}
    alone = client.stream(PATH, prompt="tea", stream_options={"continuous_usage_stats": True})
    assert not any("usage" in chunk for chunk in alone)  # as in vLLM


def test_usage_in_a_chunk_is_that_of_its_choice(client: AsgiClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, closing = client.stream(
        PATH, prompt=["tea", "honey"], n=2, max_tokens=2, stream_options=options
    )
    counts = [
        (each["choices"][0]["index"], each["usage"]["prompt_tokens"], *_generated(each))
        for each in chunks
    ]
    assert sorted(counts) == [
        (i, (3, 5)[i // 2], n, (3, 5)[i // 2] + n) for i in range(4) for n in (1, 2)
    ]
    assert closing["usage"]["prompt_tokens"] == 8
    assert _generated(closing) == (8, 16)


def _generated(chunk: dict[str, Any]) -> tuple[int, int]:
    return chunk["usage"]["completion_tokens"], chunk["usage"]["total_tokens"]


def test_chunks_are_not_obfuscated(client: AsgiClient) -> None:
    options = {"include_obfuscation": False}
    assert client.stream(PATH, prompt="tea", stream_options=options)
    refused = client.post(
        PATH, prompt="tea", stream=True, stream_options={"include_obfuscation": True}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options.include_obfuscation"


def test_a_plain_chunk_and_a_detailed_one_have_the_same_fields(client: AsgiClient) -> None:
    chunks = client.stream(PATH, prompt="tea")
    assert chunks[0].keys() == chunks[-1].keys()
    assert chunks[0]["choices"][0].keys() == chunks[-1]["choices"][0].keys()


def test_several_answers_to_a_prompt(client: AsgiClient, engine: FakeEngine) -> None:
    engine.script = text_script("one", "two")
    answer = client.post(PATH, prompt="count", n=2, seed=7).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two"]
    assert [request.request_id for request in engine.seen] == ["req-1-0", "req-1-1"]
    assert [request.sampling.seed for request in engine.seen] == [7, 8]
    assert answer["usage"]["prompt_tokens"] == 5  # the prompt counts once
    assert answer["usage"]["completion_tokens"] == 8


def test_streams_several_answers(client: AsgiClient, engine: FakeEngine) -> None:
    engine.script = text_script("one", "three")
    texts = {0: "", 1: ""}
    for chunk in client.stream(PATH, prompt="count", n=2):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "one", 1: "three"}


def test_logprobs(client: AsgiClient) -> None:
    logprobs = client.post(PATH, prompt="é", logprobs=2, max_tokens=2).json()["choices"][0]
    assert logprobs["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
            {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
        ],
        "text_offset": [0, 0],
    }


def test_streamed_logprobs_come_with_their_tokens(client: AsgiClient) -> None:
    chunks = client.stream(PATH, prompt="tea", logprobs=0, stop="EA")
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["tokens"] for entry in logprobs] == [["T"], ["E"], ["A"]]
    assert [entry["text_offset"] for entry in logprobs] == [[0], [1], [2]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["T", "", ""]


@pytest.mark.parametrize("prompt", ["tea ", list(b"tea ")])
def test_echo_prepends_the_prompt(client: AsgiClient, prompt: Any) -> None:
    answer = client.post(PATH, prompt=prompt, echo=True).json()
    assert answer["choices"][0]["text"] == "tea TEA "
    chunks = client.stream(PATH, prompt=prompt, echo=True)
    assert chunks[0]["choices"][0]["text"] == "tea T"


def test_token_ids_if_requested(client: AsgiClient) -> None:
    choice = client.post(PATH, prompt="tea", return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"tea")
    assert choice["token_ids"] == [*b"TEA", EOS]
    chunks = client.stream(PATH, prompt="tea", return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"tea")
    ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
    assert ids == [*b"TEA", EOS]


def test_every_sampling_field_reaches_the_engine(client: AsgiClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "ignore_eos": False,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    response = client.post(
        PATH,
        prompt="tea",
        stop=["!"],
        stop_token_ids=[7],
        logit_bias={"65": -1},
        allowed_token_ids=[65, 7],
        bad_words=["t", "tea"],
        priority=3,
        best_of=1,
        user="somebody",
        **fields,
    )
    assert response.status_code == 200, response.text
    sampling = engine.seen[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.stop, sampling.stop_token_ids) == (("!",), (7,))
    assert sampling.logit_bias == ((65, -1.0),)
    assert sampling.allowed_token_ids == (65, 7)
    assert sampling.bad_words_token_ids == ((116,), (116, 101, 97))
    assert engine.seen[0].priority == 3


def test_null_means_the_default(client: AsgiClient) -> None:
    response = client.post(
        PATH, prompt="tea", n=None, stop=None, suffix=None, temperature=None, stream=None
    )
    assert response.json()["choices"][0]["text"] == "TEA"


def test_a_long_text_is_tokenised_in_a_thread(client: AsgiClient) -> None:
    response = client.post(PATH, prompt="x" * 30_000)
    assert response.status_code == 400
    assert "30000 tokens" in response.json()["error"]["message"]


def test_only_safe_request_ids_are_echoed(engine: FakeEngine, client: AsgiClient) -> None:
    client.headers = {"X-Request-Id": "evil id\\x00"}
    answer = client.post(PATH, prompt="tea")
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]


def test_the_id_is_that_of_the_header_or_else_the_body(
    engine: FakeEngine, client: AsgiClient
) -> None:
    client.headers = {}
    answer = client.post(PATH, prompt="tea", request_id="mine")
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine", "mine")
    assert client.stream(PATH, prompt="tea", request_id="mine")[0]["id"] == "cmpl-mine"
    client.headers = {"X-Request-Id": "header's?"}  # not safe, so it does not count
    assert client.post(PATH, prompt="tea", request_id="mine").json()["id"] == "cmpl-mine"
    client.headers = {"X-Request-Id": "header"}
    answer = client.post(PATH, prompt="tea", request_id="not safe")
    assert answer.json()["id"] == "cmpl-header"
    assert [request.request_id for request in engine.seen] == ["mine"] * 3 + ["header"]


@pytest.mark.parametrize("request_id", ["", "a b", "x\r\ny", "x" * 129])
def test_an_unsafe_id_in_the_body_is_refused(client: AsgiClient, request_id: str) -> None:
    client.headers = {}
    refused = client.post(PATH, prompt="tea", request_id=request_id)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "request_id"
    assert "letters, digits" in refused.json()["error"]["message"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_returns_the_most_probable_choices(
    client: AsgiClient, engine: FakeEngine, logprobs: int | None
) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "best_of": 3, "logprobs": logprobs}
    # equally probable per token, so that short answers are the most probable
    engine.script = lambda request: [
        *(b"three", b"one", b"four")[int(request.request_id.rpartition("-")[2]) % 3],
        EOS,
    ]
    answer = client.post(PATH, **body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "four"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    shown = [choice["logprobs"] is not None for choice in answer["choices"]]
    assert shown == [logprobs is not None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * (6 + 4 + 5)
    groups = [request.group for request in engine.seen]
    assert len(set(groups)) == 2
    assert groups[0] is not None


def test_a_single_choice_has_no_group(client: AsgiClient, engine: FakeEngine) -> None:
    client.post(PATH, prompt="x")
    assert engine.seen[0].group is None


@pytest.mark.parametrize(("limit", "kept"), [(4, 4), (-1, 255)])
def test_the_end_of_a_truncated_prompt_remains(
    client: AsgiClient, engine: FakeEngine, limit: int, kept: int
) -> None:
    """Of texts, tokens, and messages; an echo is what remains."""
    text = "milk and sugar. " * 100 + "tea?"
    body = {"truncate_prompt_tokens": limit, "max_tokens": 1}
    choice = client.post(PATH, prompt=text, echo=True, **body).json()["choices"][0]
    assert choice["text"].startswith(text[-kept:])
    assert client.post(PATH, prompt=list(text.encode()), **body).status_code == 200
    messages = [{"role": "user", "content": text}]
    assert client.post("/v1/chat/completions", messages=messages, **body).status_code == 200
    named = {"truncation_side": "right", **body}
    assert client.post(PATH, prompt=text, **named).status_code == 200
    prompts = [bytes(request.prompt_token_ids) for request in engine.seen]
    assert prompts[:2] == [text[-kept:].encode()] * 2
    assert (len(prompts[2]), prompts[3]) == (kept, text[:kept].encode())


def test_log_probabilities_name_tokens_by_id_if_requested(client: AsgiClient) -> None:
    """In completions, with their echo, and in chat, whole or streamed."""
    by_id = {"return_tokens_as_token_ids": True}
    body = {"prompt": "t\u00e9", "max_tokens": 2, "logprobs": 1, **by_id}
    logprobs = client.post(PATH, **body).json()["choices"][0]["logprobs"]
    named = [f"token_id:{token_id}" for token_id in b"T\xc3"]
    assert logprobs["tokens"] == named
    assert all(name in top for name, top in zip(named, logprobs["top_logprobs"], strict=True))
    assert all(name.startswith("token_id:") for top in logprobs["top_logprobs"] for name in top)
    echoed = client.post(PATH, **body, echo=True).json()["choices"][0]["logprobs"]["tokens"]
    assert echoed[:3] == [f"token_id:{token_id}" for token_id in "t\u00e9".encode()]
    chunks = client.stream(PATH, **body)
    assert [n for each in chunks for n in each["choices"][0]["logprobs"]["tokens"]] == named
    chat = client.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "x"}],
        logprobs=True,
        top_logprobs=1,
        max_tokens=1,
        **by_id,
    )
    [entry] = chat.json()["choices"][0]["logprobs"]["content"]
    [token_byte] = entry["bytes"]
    assert entry["token"] == f"token_id:{token_byte}"
    assert all(top["token"] == f"token_id:{top['bytes'][0]}" for top in entry["top_logprobs"])
