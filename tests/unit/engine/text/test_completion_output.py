"""The text of one choice: what is shown, what is omitted, and what is reported to the engine."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import EOS, FakeEngine, text_script

from mooncake_engine.errors import RequestFailed
from mooncake_engine.messages import EngineRequest, FinishReason
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.text.completion_output import (
    ChoiceStream,
    OnUpdate,
    TextOutputProcessor,
    TextUpdate,
)
from mooncake_engine.text.tokenizer import Tokenizer
from mooncake_kv.params import NO_KV_TRANSFER, FirstToken, KVTransferParams


def run(
    engine: FakeEngine,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    params: KVTransferParams = NO_KV_TRANSFER,
    *,
    is_first_delivered: bool = False,
) -> list[TextUpdate]:
    request = EngineRequest("r", tuple(b"prompt"), sampling, params)

    async def collect() -> list[TextUpdate]:
        updates: list[TextUpdate] = []
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(update: TextUpdate) -> None:
            updates.append(update)
            if update.finish is not None:
                over.set_result(None)

        stream = ChoiceStream(
            engine,
            request,
            TextOutputProcessor(tokenizer, sampling),
            on_text=take,
            on_error=over.set_exception,
            is_first_delivered=is_first_delivered,
        )
        await stream.start()
        await over
        stream.close()
        return updates

    return asyncio.run(collect())


def text_of(updates: list[TextUpdate]) -> str:
    return "".join(update.text for update in updates)


def test_the_stop_token_counts_and_is_not_shown(byte_tokenizer: Tokenizer) -> None:
    updates = run(FakeEngine(text_script("tea")), byte_tokenizer, SamplingParams())
    assert text_of(updates) == "tea"
    assert updates[-1].finish is FinishReason.STOP
    assert updates[-1].token_ids == (EOS,)
    assert updates[-1].stop_reason is None


def test_the_stop_token_is_shown_if_requested(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert text_of(run(FakeEngine(text_script("tea")), byte_tokenizer, sampling)) == "tea<|eos|>"


def test_a_stop_token_of_the_client_is_the_stop_reason(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop_token_ids=(EOS,))
    updates = run(FakeEngine(text_script("tea")), byte_tokenizer, sampling)
    assert updates[-1].stop_reason == EOS


def test_a_stop_string_ends_the_request(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("tea, cake, honey"))
    updates = run(engine, byte_tokenizer, SamplingParams(stop=(", c",), max_tokens=None))
    assert text_of(updates) == "tea"
    assert updates[-1].finish is FinishReason.STOP
    assert updates[-1].stop_reason == ", c"
    assert sum(len(update.token_ids) for update in updates) == len("tea, c")
    assert engine.left_early == ["r"]


def test_held_back_text_is_released_at_the_length_limit(byte_tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("ten",), max_tokens=2)
    updates = run(FakeEngine(text_script("tea")), byte_tokenizer, sampling)
    assert [update.text for update in updates] == ["", "te"]
    assert updates[-1].finish is FinishReason.LENGTH


def test_offsets_count_decoded_characters(byte_tokenizer: Tokenizer) -> None:
    updates = run(FakeEngine(text_script("é!")), byte_tokenizer, SamplingParams(logprobs=0))
    assert [update.text_offsets for update in updates] == [(0,), (0,), (1,), (2,)]
    assert [entry.token_id for u in updates for entry in u.logprobs] == [*"é!".encode(), EOS]


def test_a_failed_request_has_a_reason(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestFailed, match="bad luck"):
        run(FakeEngine(text_script("tea"), fail_at=1), byte_tokenizer, SamplingParams())


def test_held_back_text_is_kept_for_the_peer(byte_tokenizer: Tokenizer) -> None:
    """The decode instance shows the text once it is final."""
    updates = run(
        FakeEngine(text_script("é")),
        byte_tokenizer,
        SamplingParams(),
        KVTransferParams(keeps_kv=True),
    )
    assert text_of(updates) == ""
    assert updates[-1].finish is FinishReason.LENGTH
    assert updates[-1].kv_transfer_params is not None


def test_a_stop_string_in_the_first_token_releases_the_kv(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("x marks"))
    updates = run(
        engine, byte_tokenizer, SamplingParams(stop=("x",)), KVTransferParams(keeps_kv=True)
    )
    assert updates[-1].finish is FinishReason.STOP
    assert updates[-1].kv_transfer_params is None
    assert engine.aborted == ["r"]


@pytest.mark.parametrize("answer", ["tea", "é!", "END of"])
def test_prefill_and_decode_give_the_same_text_as_one_instance(
    byte_tokenizer: Tokenizer, answer: str
) -> None:
    sampling = SamplingParams(stop=("ENDE",), logprobs=1)
    whole = run(FakeEngine(text_script(answer)), byte_tokenizer, sampling)
    first = run(
        FakeEngine(text_script(answer)), byte_tokenizer, sampling, KVTransferParams(keeps_kv=True)
    )
    incoming = KVTransferParams(first_token=FirstToken(answer.encode()[0]))
    rest = run(
        FakeEngine(text_script(answer)), byte_tokenizer, sampling, incoming, is_first_delivered=True
    )
    assert text_of(first) + text_of(rest) == text_of(whole) == answer
    logprobs = [[entry for update in part for entry in update.logprobs] for part in (first, rest)]
    assert logprobs[0] + logprobs[1] == [entry for update in whole for entry in update.logprobs]
    assert len(logprobs[0]) == 1
    assert [i for update in rest for i in update.token_ids] == [*answer.encode(), EOS]


def test_closing_early_aborts_the_request(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(text_script("tea"), hold_at=1)
    texts: list[TextUpdate] = []

    async def leave() -> None:
        request = EngineRequest("r", tuple(b"prompt"), SamplingParams())
        stream = ChoiceStream(
            engine,
            request,
            TextOutputProcessor(byte_tokenizer, request.sampling),
            on_text=texts.append,
            on_error=pytest.fail,
        )
        await stream.start()
        await engine.held.wait()
        stream.close()
        engine.release.set()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert engine.left_early == ["r"]
    assert text_of(texts) == "t"


class PublishedEngine(FakeEngine):
    """An engine that has ended every request; the last update is still on its way."""

    async def submit(self, request: EngineRequest, on_update: OnUpdate) -> str:
        [last] = self._updates(request)
        asyncio.get_running_loop().call_soon(on_update, last)
        return request.request_id


def test_kv_for_a_peer_is_released_if_the_client_leaves_before_the_last_update(
    byte_tokenizer: Tokenizer,
) -> None:
    engine = PublishedEngine(text_script("tea"))

    async def leave() -> None:
        request = EngineRequest(
            "r", tuple(b"prompt"), SamplingParams(), KVTransferParams(keeps_kv=True)
        )
        processor = TextOutputProcessor(byte_tokenizer, request.sampling)
        stream = ChoiceStream(engine, request, processor, on_text=pytest.fail, on_error=pytest.fail)
        await stream.start()
        stream.close()
        await asyncio.sleep(0)

    asyncio.run(leave())
    assert engine.aborted == ["r"]


def test_an_error_in_a_callback_ends_only_its_choice(byte_tokenizer: Tokenizer) -> None:
    """If the callback fails, the error is reported and the engine aborts the request."""
    engine = FakeEngine(text_script("tea"))

    def take(_: TextUpdate) -> None:
        raise ValueError("no room for text")

    async def fail() -> Exception:
        request = EngineRequest("r", tuple(b"prompt"), SamplingParams())
        processor = TextOutputProcessor(byte_tokenizer, request.sampling)
        error: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        stream = ChoiceStream(engine, request, processor, on_text=take, on_error=error.set_result)
        await stream.start()
        return await error

    assert str(asyncio.run(fail())) == "no room for text"
    assert engine.left_early == ["r"]


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (SamplingParams(), "eapot"),  # not the first token, and not the end
        (SamplingParams(logprobs=1), ""),
        (SamplingParams(min_tokens=1), "eapot"),
    ],
    ids=["text alone", "log probabilities", "a length"],
)
def test_plain_tokens_take_the_fast_path(
    byte_tokenizer: Tokenizer, sampling: SamplingParams, plain: str
) -> None:
    """They keep their order with updates on the slow path, and give the same text."""
    engine = FakeEngine(text_script("teapot"))
    processor = TextOutputProcessor(byte_tokenizer, sampling)
    seen: list[str] = []
    short: list[int] = []

    def take_token(token_id: int) -> None:
        short.append(token_id)
        seen.append(processor.push_token(token_id))

    async def collect() -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(update: TextUpdate) -> None:
            seen.append(update.text)
            if update.finish is not None:
                over.set_result(None)

        stream = ChoiceStream(
            engine,
            EngineRequest("r", tuple(b"prompt"), sampling),
            processor,
            on_text=take,
            on_error=over.set_exception,
            on_plain_token=take_token,
        )
        await stream.start()
        await over
        stream.close()

    asyncio.run(collect())
    assert "".join(seen) == "teapot"
    assert bytes(short).decode() == plain


def test_searched_text_takes_no_fast_path(byte_tokenizer: Tokenizer) -> None:
    assert TextOutputProcessor(byte_tokenizer, SamplingParams()).is_plain
    assert not TextOutputProcessor(byte_tokenizer, SamplingParams(stop=("pot",))).is_plain
