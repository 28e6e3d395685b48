"""The tokens that a request has sent so far, and those that the next pass generates again."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_proxy.api.openai_bodies import OpenAIEndpoint, answer_decoder, parse_request
from mooncake_proxy.api.proxied_request import RequestContext
from mooncake_proxy.errors import ConnectionLost, MalformedResponse, Recomputed
from mooncake_proxy.flows import migration
from mooncake_proxy.flows.continued_prompt import ContinuedForwarder
from mooncake_proxy.flows.token_record import (
    MAX_HELD_BYTES,
    RecordingForwarder,
    TokenRecord,
    is_role_only,
)


def chunk(text: str, ids: list[int], **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None} | more
    return json.dumps(
        {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
        | {"choices": [{"prompt_token_ids": [1, 2]} | choice]}
    ).encode()


def record(**more: Any) -> TokenRecord:
    return TokenRecord(OpenAIEndpoint.COMPLETION, **({"shows_ids": False} | more))


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        ([("a", [10]), ("b", [11])], [10, 11]),
        ([("a", [10]), ("", [11])], [10]),
        ([("a", [10]), ("", [11]), ("é", [12])], [10, 11, 12]),
        ([("a", [10]), ("\ufffd", [11])], [10]),
        ([("", [10])], []),
    ],
    ids=["all shown", "half a character", "a whole one", "an incomplete one", "nothing yet"],
)
def test_tokens_without_sent_text_are_regenerated(
    pieces: list[tuple[str, list[int]]], kept: list[int]
) -> None:
    found = record()
    for text, ids in pieces:
        found.record_event(chunk(text, ids))
    found.begin_next_pass()
    assert (found.prompt, found.generated) == ([1, 2], kept)


def test_client_with_token_ids_keeps_all_tokens() -> None:
    found = record(shows_ids=True)
    found.record_event(chunk("", [10]))
    found.begin_next_pass()
    assert found.generated == [10]


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize(
    ("piece", "kept", "last"), [("a", [10], "b"), ("a\ufffd", [], "aé"), ("", [], "a")]
)
def test_non_streamed_answer_repeats_nothing(
    piece: str, kept: list[int], last: str, shows_ids: bool
) -> None:
    """Nothing is sent before the answer is complete: its text is kept with its tokens."""
    found = record(shows_ids=shows_ids)
    with pytest.raises(Recomputed):
        found.record_answer(chunk(piece, [10], stop_reason="recomputed"), "d")
    found.begin_next_pass()
    assert found.generated == kept
    more = {"prompt_token_ids": [1, 2, *kept], "finish_reason": "stop"}
    [choice] = json.loads(found.record_answer(chunk(last, [11], **more), "d"))["choices"]
    assert choice["text"] == ("ab" if kept else last)
    shown = {"token_ids": [*kept, 11], "prompt_token_ids": [1, 2]}
    assert {name: choice[name] for name in shown if name in choice} == (shown if shows_ids else {})


def logprobs_of(*tokens: str) -> dict[str, Any]:
    offsets = [len("".join(tokens[:i])) for i in range(len(tokens))]
    return {
        "tokens": list(tokens),
        "token_logprobs": [-ord(token[0]) / 10 for token in tokens],
        "top_logprobs": [{token: -1.0} for token in tokens],
        "text_offset": offsets,
    }


@pytest.mark.parametrize("is_torn", [False, True])
def test_logprobs_of_non_streamed_answer_join_all_passes(is_torn: bool) -> None:
    found = record()
    passes = [("ab", ["a", "b"], 2), ("cd", ["cd"], 1)]
    if is_torn:  # regenerated, so its log probabilities are dropped
        passes.insert(1, ("x\ufffd", ["x", "\ufffd"], 2))
    for text, tokens, num in passes:
        more = {"stop_reason": "recomputed", "logprobs": logprobs_of(*tokens)}
        with pytest.raises(Recomputed):
            found.record_answer(chunk(text, [10] * num, **more), "d")
        found.begin_next_pass()
    last = chunk("ef", [11, 12], finish_reason="stop", logprobs=logprobs_of("e", "f"))
    [choice] = json.loads(found.record_answer(last, "d"))["choices"]
    assert choice["text"] == "abcdef"
    assert choice["logprobs"] == logprobs_of("a", "b", "cd", "e", "f")


def test_logprobs_are_kept_if_last_pass_has_none() -> None:
    found = record()
    more = {"stop_reason": "recomputed", "logprobs": logprobs_of("a")}
    with pytest.raises(Recomputed):
        found.record_answer(chunk("a", [10], **more), "d")
    found.begin_next_pass()
    last = chunk("", [11], finish_reason="stop", logprobs=None)
    [choice] = json.loads(found.record_answer(last, "d"))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("a", logprobs_of("a"))


@pytest.mark.parametrize(
    "logprobs", ["x", logprobs_of("b") | {"top_logprobs": None}, {"text_offset": [None]}]
)
def test_incompatible_logprobs_are_malformed(logprobs: object) -> None:
    """From an instance that returns another format than the previous one."""
    found = record()
    more = {"stop_reason": "recomputed", "logprobs": logprobs_of("a")}
    with pytest.raises(Recomputed):
        found.record_answer(chunk("a", [10], **more), "d")
    found.begin_next_pass()
    last = chunk("b", [11], finish_reason="stop", logprobs=logprobs)
    with pytest.raises(MalformedResponse, match="d: no answer with one choice"):
        found.record_answer(last, "d")


class Client:
    """The request as a forwarder sees it, and the events that the client receives."""

    def __init__(self) -> None:
        self.is_committed, self.tenant, self.answer_id = False, None, None
        self.reply_headers: list[object] = []
        self.request, self.has_started, self.sent = self, False, b""

    def start_stream(self, kind: str, headers: object, data: bytes) -> None:
        self.has_started = True
        self.write(data)

    def write(self, data: bytes) -> None:
        self.sent += data

    def choices(self) -> list[dict[str, Any]]:
        events = self.sent.decode().split("\n\n")[:-1]
        return [each for event in events for each in json.loads(event[6:])["choices"]]


def feed_pass(client: Any, found: TokenRecord, *chunks: bytes) -> None:
    """Feed one instance's stream, all events after the first in one packet."""
    client.is_committed = False
    forwarder = RecordingForwarder(client, "d", lambda: None, found)
    first, *rest = [b"data: %b\n\n" % each for each in chunks]
    forwarder.feed(first)
    forwarder.feed(b"".join(rest))


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("last", ["", "b", "\ufffd"])
def test_recompute_within_a_character_sends_each_token_once(last: str, shows_ids: bool) -> None:
    """The recompute event may carry text, such as the held-back start of a stop string."""
    found, client = record(shows_ids=shows_ids), Client()
    kept = [10, 11, 12] if last == "b" else [10]
    with pytest.raises(Recomputed):
        feed_pass(
            client,
            found,
            chunk("a", [10], logprobs=logprobs_of("a")),
            chunk("", [11], logprobs=logprobs_of("\ufffd")),
            chunk(
                last, [12], stop_reason="recomputed", finish_reason="stop",
                logprobs=logprobs_of(last or "\ufffd"),
            ),
        )  # fmt: skip
    found.begin_next_pass()
    assert found.generated == kept
    feed_pass(
        client,
        found,
        chunk("é", [20], logprobs=logprobs_of("é")),
        chunk("", [21], logprobs=logprobs_of("z")),
        chunk("z", [22], logprobs=logprobs_of("z")),
        chunk("", [], finish_reason="stop"),
    )
    choices = client.choices()
    assert "".join(each["text"] for each in choices) == "a" + last.strip("\ufffd") + "éz"
    tokens = [
        token for each in choices for token in (each.get("logprobs") or {"tokens": []})["tokens"]
    ]
    assert len(tokens) == len(found.generated) == len(kept) + 3
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["stop"]
    ids = [each for choice in choices for each in choice.get("token_ids", ())]
    assert ids == (found.generated if shows_ids else [])
    [first] = [each for each in choices if each["text"] == "é"]
    assert first["logprobs"]["text_offset"] == [2 if last == "b" else 1]


def test_held_back_text_is_sent_before_final_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, client = record(), Client()
    monkeypatch.setattr(migration, "_start_record", lambda router, context: found)

    async def run_pass(router: Any, context: Any) -> None:
        feed_pass(context, found, chunk("a", [10]), chunk("b\ufffd", [11]))
        raise ConnectionLost("d", "closed")

    router: Any = None
    context: Any = client
    with pytest.raises(ConnectionLost):
        asyncio.run(migration.run_passes(router, context, run_pass))
    assert "".join(each["text"] for each in client.choices()) == "ab\ufffd"


def test_held_back_text_is_sent_at_end_of_stream() -> None:
    """From an instance that sends no finish reason."""
    found, client = record(), Client()
    feed_pass(client, found, chunk("a", [10]), chunk("b\ufffd", [11]), b"[DONE]")
    client.sent, end = client.sent.removesuffix(b"data: [DONE]\n\n"), client.sent[-14:]
    assert end == b"data: [DONE]\n\n"
    assert "".join(each["text"] for each in client.choices()) == "ab\ufffd"


@pytest.mark.parametrize("shows_ids", [False, True])
def test_number_of_held_back_tokens_is_bounded(shows_ids: bool) -> None:
    """Ten thousand special tokens; a character needs at most four."""
    found, client = record(shows_ids=shows_ids), Client()
    tokens = [chunk("", [token]) for token in range(10_000)]
    feed_pass(client, found, chunk("a", [10]), *tokens)
    size = len(b"data: %b\n\n" % tokens[0])
    num_kept = 10_001 - len(client.choices())
    assert num_kept * size < 2 * MAX_HELD_BYTES
    found.begin_next_pass()
    ids = [each for choice in client.choices() for each in choice.get("token_ids", ())]
    assert ids == (found.generated if shows_ids else [])


@pytest.mark.parametrize("stop_reason", [None, "recomputed"])
def test_recomputed_answer_has_no_finish_reason(stop_reason: str | None) -> None:
    found = record()
    found.record_event(chunk("a", [10], finish_reason="stop", stop_reason=stop_reason))
    assert found.has_finished == (stop_reason is None)


def parsed_chunk(text: str, ids: list[int], field: str) -> bytes:
    """A chunk or an answer with reasoning beside its text."""
    data = json.loads(chunk(text, ids, stop_reason="recomputed"))
    data["choices"][0][field] = {"role": "assistant", "reasoning": "hm", "content": text}
    return json.dumps(data).encode()


def passing(found: TokenRecord, body: dict[str, Any]) -> bool:
    """Whether a request that this record belongs to can have another pass."""
    raw = json.dumps(body).encode()
    request: Any = SimpleNamespace(body=raw)
    parsed, fields = parse_request(raw)
    context = RequestContext(
        request, OpenAIEndpoint.CHAT, parsed, fields, "id", 0.0, 1.0, 1, answer_id="chatcmpl-1"
    )
    is_possible = migration._begin_next_pass(context, found)
    assert not is_possible or (request.body == raw) == (not found.generated)
    return is_possible


def test_reasoning_is_generated_again_with_its_answer() -> None:
    found = TokenRecord(OpenAIEndpoint.CHAT, shows_ids=True)
    with pytest.raises(Recomputed):
        found.record_answer(parsed_chunk("a", [10, 11], "message"), "d")
    assert passing(found, {"messages": []})
    last = parsed_chunk("ab", [10, 11, 12], "message").replace(b'"recomputed"', b"null")
    [choice] = json.loads(found.record_answer(last, "d"))["choices"]
    assert choice["message"] == {"role": "assistant", "reasoning": "hm", "content": "ab"}
    assert choice["token_ids"] == [10, 11, 12]


def test_stream_that_began_with_reasoning_can_not_be_continued() -> None:
    """The text of a completion would go on as content, reasoning or not."""
    found = TokenRecord(OpenAIEndpoint.CHAT, shows_ids=False)
    found.record_event(chunk("a", [10]))
    assert passing(found, {"messages": [], "stream": True})
    found.record_event(parsed_chunk("", [11], "delta"))
    assert not passing(found, {"messages": [], "stream": True})


def test_parsed_stream_is_continued_by_instances_that_can() -> None:
    found = TokenRecord(
        OpenAIEndpoint.CHAT, shows_ids=False, may_migrate=True, continues_answer=True
    )
    for text, ids in [("a", [10]), ("\ufffd", [11]), ("", [12])]:
        assert found.record_event(parsed_chunk(text, ids, "delta"), may_hold=True)
    assert found.may_migrate
    assert passing(found, {"messages": [], "stream": True})
    assert found.generated == [10, 11, 12]


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("num_repeated", [0, 1])
def test_unparsed_chunks_are_recorded_as_parsed_ones(shows_ids: bool, num_repeated: int) -> None:
    texts = ["a", '"}],"token_ids":[9],{"', "", "é\\", "b", '"finish_reason":null']
    chunks = [json.loads(chunk(text, [10 + i, 20 + i])) for i, text in enumerate(texts)]
    del chunks[3]["choices"][0]["token_ids"]
    for each in chunks[1:]:
        del each["choices"][0]["prompt_token_ids"]
    chunks[4]["id"] = "cmpl-1-1"  # of a second attempt
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    seen: list[tuple[list[Any], list[int], int, bool]] = []
    for continues_answer in (False, True):
        found = record(shows_ids=shows_ids, continues_answer=continues_answer)
        found._num_repeated = num_repeated
        compact = [json.dumps(each, separators=(",", ":")).encode() for each in chunks]
        events = [found.record_event(each) for each in compact]
        answers = [json.loads(event[6:]) for event in events]
        seen.append((answers, found.generated, len(found.prompt), found.has_finished))
    assert seen[0] == seen[1]


def test_parsed_fields_disable_migration() -> None:
    found = record(may_migrate=True)
    found.record_event(chunk("a", [10]))
    assert found.may_migrate
    data = json.loads(chunk("", [11]))
    data["choices"][0]["delta"] = {"role": "assistant", "reasoning_content": "hm"}
    found.record_event(json.dumps(data).encode())
    assert not found.may_migrate


@pytest.mark.parametrize("includes_usage", [True, False])
def test_stream_that_lacks_only_its_end_is_completed(includes_usage: bool) -> None:
    found = record()
    found.record_event(chunk("a", [10], finish_reason="length"))
    *usage, done = found.closing_events(includes_usage=includes_usage).strip().split(b"\n\n")
    assert done == b"data: [DONE]"
    assert len(usage) == includes_usage
    for event in usage:
        payload = json.loads(event[6:])
        assert (payload["id"], payload["choices"]) == ("cmpl-1", [])
        assert payload["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}


def test_first_token_not_repeated_by_lost_decoder_is_not_expected_again() -> None:
    answer = answer_decoder.decode(chunk("a", [10]))
    found = record()
    found.record_first_token(answer, b"data: %b\n\n" % chunk("a", []), is_prompt=False)
    found.begin_next_pass()
    found.record_event(chunk("b", [11]))
    assert found.generated == [10, 11]


@pytest.mark.parametrize(("is_prompt", "ids"), [(False, [10, 11]), (True, [11])])
def test_first_token_counts_once(is_prompt: bool, ids: list[int]) -> None:
    answer = answer_decoder.decode(chunk("a", [10]))
    found = record()
    found.record_first_token(answer, b"data: %b\n\n" % chunk("a", []), is_prompt=is_prompt)
    found.record_event(chunk("b", ids))
    assert found.generated == [10, 11]


NO_UTF_8 = b'{"choices": [{"text": "\xff"}]}'
NO_LIST = b'{"choices": {"text": "a"}, "usage": {"prompt_tokens": 1}}'
NO_DELTA = b'{"choices": [{"delta": "recomputed", "stop_reason": "recomputed"}]}'


@pytest.mark.parametrize(
    "data", [NO_UTF_8, NO_LIST, b"[]", b'{"choices": [5]}', b'{"choices": []}']
)
def test_invalid_answer_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedResponse, match="d: no answer with one choice"):
        record().record_answer(data, "d")


@pytest.mark.parametrize(
    ("data", "is_recorded"),
    [(NO_UTF_8, True), (NO_LIST, True), (NO_DELTA, True), (NO_UTF_8, False), (NO_LIST, False)],
)
def test_invalid_chunk_is_malformed(data: bytes, is_recorded: bool) -> None:
    """Any other exception would escape the connection's callback and look like a lost instance."""
    context: Any = SimpleNamespace(is_committed=False)
    if is_recorded:
        found = record()
        found.chunk_head = {"id": "cmpl-1"}
        forwarder: Any = RecordingForwarder(context, "d", lambda: None, found)
    else:
        forwarder = ContinuedForwarder(context, "d", lambda: None)
    with pytest.raises(MalformedResponse, match="d: no OpenAI chunk"):
        forwarder.feed(b"data: %b\n\n" % data)


@pytest.mark.parametrize(
    ("delta", "begins"),
    [
        ({"role": "assistant", "content": ""}, True),
        ({"role": "assistant", "content": "a"}, False),
        ({"role": "assistant", "reasoning_content": "hm"}, False),
        ({"content": ""}, False),
    ],
)
def test_chunk_with_more_than_a_role_is_not_the_opening_chunk(
    delta: dict[str, str], begins: bool
) -> None:
    assert is_role_only({"delta": delta}) is begins
