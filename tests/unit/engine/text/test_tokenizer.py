"""Tokenizer: text to ids and back, chat templates, fingerprints, and what it rejects."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.byte_tokenizer import EOS, write_byte_tokenizer
from tokenizers import (
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mooncake_engine.errors import CheckpointError, ConfigError, InvalidRequest
from mooncake_engine.replay.prompt_tokenizer import PromptTokenizer
from mooncake_engine.text.tokenizer import Tokenizer, token_to_bytes
from mooncake_engine.text.tokenizer_files import tokenizer_fingerprint

A = {"id": "A", "type_id": 0}
USER = {"role": "user", "content": "hi"}


def test_encodes_and_decodes(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("é → 🍵<|eos|>")
    assert ids == (*"é → 🍵".encode(), EOS)
    assert byte_tokenizer.decode(ids) == "é → 🍵"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "é → 🍵<|eos|>"


def check_others_run_meanwhile(work: Callable[[], object]) -> None:
    """Check that ``work`` releases the GIL: otherwise no other thread runs before it has ended."""
    begins, ran = threading.Event(), threading.Event()

    def run() -> None:
        begins.wait()
        ran.set()

    other = threading.Thread(target=run)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # this thread gives the GIL away only of its own accord
    try:
        begins.set()
        work()
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_long_texts_do_not_stop_other_threads(byte_tokenizer: Tokenizer) -> None:
    text, ids = "tea time " * 40_000, (*b"tea time ",) * 40_000
    check_others_run_meanwhile(lambda: byte_tokenizer.encode(text))
    check_others_run_meanwhile(lambda: byte_tokenizer.decode(ids))
    assert byte_tokenizer.encode(text) == ids
    assert byte_tokenizer.decode(ids) == text


@pytest.mark.parametrize("adds", [True, False])
def test_long_texts_have_the_special_tokens_of_short_ones(tmp_path: Path, adds: bool) -> None:
    directory = write_byte_tokenizer(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|eos|>", "type_id": 0}}, {"Sequence": A}],
        "pair": [{"Sequence": A}, {"Sequence": A | {"id": "B"}}],
        "special_tokens": {"<|eos|>": {"id": "<|eos|>", "ids": [EOS], "tokens": ["<|eos|>"]}},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(directory)
    long = tokenizer.encode("é<|eos|>" * 10_000, add_special_tokens=adds)
    assert long == (EOS,) * adds + (*"é".encode(), EOS) * 10_000
    assert tokenizer.encode("é", add_special_tokens=adds) == (EOS,) * adds + (*"é".encode(),)
    assert tokenizer.decode(long) == "é" * 10_000
    assert tokenizer.decode(long, skip_special_tokens=False).count("<|eos|>") == 10_000 + adds


def write_tokenizer(
    directory: Path, backend: Backend, tokenizer_class: str, **settings: Any
) -> Path:
    """Write a tokenizer.json, and a tokenizer_config.json that names this class."""
    backend.save(str(directory / "tokenizer.json"))
    end = {"__type": "AddedToken", "content": "</s>", "special": True}
    named = {"bos_token": "<s>", "eos_token": end, "unk_token": "<unk>"}
    named |= {"tokenizer_class": tokenizer_class, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return directory


def digits_apart() -> Backend:
    """A tokenizer that splits before every digit, as SmolLM's, so that line breaks before a digit
    are one token."""
    pairs = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("1", "2")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def space_prepended() -> Backend:
    """A tokenizer as Llama 2's, that prepends a space to every text between special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁hi12", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.mark.parametrize("make", [digits_apart, space_prepended])
@pytest.mark.parametrize(
    "tokenizer_class",
    ["GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"],
)
def test_text_is_split_as_tokenizer_json_says_whatever_the_class(
    tmp_path: Path, make: Callable[[], Backend], tokenizer_class: str
) -> None:
    backend = make()
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, backend, tokenizer_class))
    for text in ("hi\n\n1. hi", "   12", "<s>hi</s>hi", " hi", "", "\u0065\u0301"):
        ids = tokenizer.encode(text)
        assert list(ids) == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(list(ids))


def test_a_class_of_the_repositorys_own_code_is_not_needed(tmp_path: Path) -> None:
    auto = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    backend = digits_apart()
    write_tokenizer(tmp_path, backend, "TikTokenTokenizer", auto_map=auto)
    assert list(Tokenizer.load(tmp_path).encode("hi 12")) == backend.encode("hi 12").ids


@pytest.mark.parametrize("of_file", ["nothing", "<s>"])
@pytest.mark.parametrize(
    ("tokenizer_class", "flags", "expected"),
    [
        ("LlamaTokenizerFast", {"add_bos_token": True, "add_eos_token": False}, "<s>hi"),
        ("LlamaTokenizer", {"add_bos_token": False}, "hi"),
        ("LlamaTokenizer", {"add_bos_token": True, "bos_token": None}, "hi"),
        ("LlamaTokenizer", {"add_eos_token": True}, "<s>hi</s>"),
        ("LlamaTokenizer", {}, None),
        ("Qwen2Tokenizer", {"add_bos_token": True}, None),
        ("PreTrainedTokenizerFast", {"add_bos_token": False, "add_eos_token": True}, None),
    ],
)
def test_ends_are_added_by_flags_for_llama_and_by_tokenizer_json_for_others(
    tmp_path: Path, of_file: str, tokenizer_class: str, flags: dict[str, Any], expected: str | None
) -> None:
    backend = digits_apart()
    if of_file == "<s>":
        begin = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[begin])
    expected = expected or {"nothing": "hi", "<s>": "<s>hi"}[of_file]
    directory = write_tokenizer(tmp_path, backend, tokenizer_class, **flags)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=False) == expected
    assert tokenizer.decode(tokenizer.encode("hi", add_special_tokens=False)) == "hi"
    of_bench = PromptTokenizer.load(str(directory))
    assert of_bench.count("hi") == len(tokenizer.encode("hi")) == 2 + of_bench.num_added


def test_knows_every_tokens_bytes(byte_tokenizer: Tokenizer) -> None:
    assert [byte_tokenizer.token_bytes(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert byte_tokenizer.token_bytes(EOS) == b"<|eos|>"
    assert byte_tokenizer.token_bytes(257) == b"<|a note|>"  # a space: no byte-level spelling
    assert byte_tokenizer.token_bytes(9999) == b""  # the model's vocabulary may be padded


def test_knows_bytes_of_fallback_tokens(fallback_tokenizer: Tokenizer) -> None:
    ids = fallback_tokenizer.encode("to é")
    assert b"".join(map(fallback_tokenizer.token_bytes, ids)) == "to é".encode()


def test_special_ids_are_the_special_tokens_only(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.special_ids == {EOS}


def test_renders_chat(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.render_chat([USER]) == "<|user|>hi\n<|assistant|>"
    assert byte_tokenizer.render_chat([USER], add_generation_prompt=False) == "<|user|>hi\n"


@pytest.mark.parametrize("template", ["{{bad", "{% if messages %}", "a\n{% nonsense %}"])
def test_malformed_template_of_an_option_is_refused_at_start(tmp_path: Path, template: str) -> None:
    directory, line = write_byte_tokenizer(tmp_path), 1 + template.count("\n")
    with pytest.raises(ConfigError, match=f"--chat-template is no valid Jinja .*, line {line}: "):
        Tokenizer.load(directory, template)


def test_malformed_template_of_a_model_is_logged_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_byte_tokenizer(tmp_path)
    Tokenizer.load(directory)
    assert not caplog.messages
    (directory / "chat_template.jinja").write_text("a\n{% for one in %}")
    tokenizer = Tokenizer.load(directory)
    assert "is no valid Jinja template, line 2: " in caplog.messages[0]
    with pytest.raises(InvalidRequest, match=r"chat template is no valid Jinja template, line 2: "):
        tokenizer.render_chat([USER])


def test_template_that_rejects_some_messages_is_accepted(tmp_path: Path) -> None:
    template = "{% if messages|length < 2 %}{{ raise_exception('more') }}{% endif %}"
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path), template)
    with pytest.raises(InvalidRequest, match="rejects these messages: more"):
        tokenizer.render_chat([USER])


def test_continues_the_final_message(byte_tokenizer: Tokenizer) -> None:
    messages = [USER, {"role": "assistant", "content": "Well"}]
    text = byte_tokenizer.render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<|user|>hi\n<|assistant|>Well"


def test_a_message_that_its_template_changes_is_not_continued(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content.split('\\n')[0] }}{% endfor %}"
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=template))
    messages = [USER, {"role": "assistant", "content": "One.\nTwo."}]
    with pytest.raises(InvalidRequest, match=r"changes it: end with a user message") as info:
        tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert info.value.param == "messages"


def test_an_error_of_the_template_is_a_client_error(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="rejects these messages: no tools here") as info:
        byte_tokenizer.render_chat([{"role": "tool", "content": "42"}])
    assert info.value.param == "messages"


_LOOP = "{% for message in messages %}<{{ message.role }}>"
PARTS = (
    _LOOP + "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
STRINGS = {
    "repr": _LOOP + "{{ message.content }}{% endfor %}",
    "json": _LOOP + "{{ message.content | tojson }}{% endfor %}",
    "sum": _LOOP + "{{ '' + message.content }}{% endfor %}",
    "method": _LOOP + "{{ message.content.strip() }}{% endfor %}",
    "nothing": _LOOP + "{% if message.content is string %}{{ message.content }}{% endif %}"
    "{% endfor %}",
}


def in_parts(role: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in "ab"]}


def test_a_template_that_lays_out_parts_gets_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path), PARTS)
    text = tokenizer.render_chat([in_parts("user"), USER, in_parts("tool")])
    assert text == "<user>[a][b]<user>hi<tool>a\nb"


@pytest.mark.parametrize("kind", STRINGS)
def test_other_templates_get_parts_joined(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path), STRINGS[kind])
    expected = r'"a\nb"' if kind == "json" else "a\nb"
    assert tokenizer.render_chat([in_parts("user")]) == f"<user>{expected}"


def test_later_system_messages_move_only_where_the_template_would_reject_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reject = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    strict = _LOOP + reject + "{% endif %}{{ message.content }}{% endfor %}"
    reminded = [USER, {"role": "system", "content": "Be brief."}, USER, in_parts("system")]
    for template, expected in (
        (STRINGS["repr"], "<user>hi<system>Be brief.<user>hi<system>a\nb"),
        (strict, "<system>Be brief.\n\na\nb<user>hi<user>hi"),
    ):
        tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path), template)
        assert [tokenizer.render_chat(reminded) for _ in range(2)] == [expected] * 2
    assert ["only at the start" in message for message in caplog.messages] == [True]


def test_reserved_template_kwargs_are_rejected(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="may not set 'chat_template'"):
        byte_tokenizer.render_chat([USER], template_kwargs={"chat_template": "{{ 1 }}"})


def test_missing_template_error_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_byte_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        tokenizer.render_chat([USER])


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    first = write_byte_tokenizer(tmp_path / "first")
    twin = write_byte_tokenizer(tmp_path / "twin")
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(twin)
    (twin / "weights.bin").write_bytes(b"no part of a tokenizer")
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(twin)
    (twin / "chat_template.jinja").write_text("another layout")
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(twin)


def test_empty_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wanted tokenizer.json .* found none"):
        Tokenizer.load(tmp_path)


def test_tiktoken_without_tokenizer_json_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_text("IQ== 0")
    with pytest.raises(CheckpointError, match=r"found tiktoken.model: convert it to tokenizer.jso"):
        Tokenizer.load(tmp_path)


def test_sentencepiece_is_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0a\n\x03<s>")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="is missing: pip install sentencepiece"):
        Tokenizer.load(tmp_path)


def test_incomplete_tokenizer_is_rejected(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path)
    content = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="can't load the tokenizer"):
        Tokenizer.load(directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_file_of_another_form_is_rejected(tmp_path: Path, name: str) -> None:
    directory = write_byte_tokenizer(tmp_path)
    (directory / name).write_text("[]")
    with pytest.raises(CheckpointError, match=r"one of its JSON files is not what .* expects: \w+"):
        Tokenizer.load(directory)


def test_tokenizer_of_a_newer_format_is_rejected(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path)
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] = {"type": "Newer"}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"tokenizers \d.* can't read {tmp_path}.*: \w+"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("content", "message"), [("{", "can't be read"), ("[]", "must hold a JSON object, found list")]
)
def test_damaged_config_is_not_called_a_damaged_tokenizer(
    tmp_path: Path, content: str, message: str
) -> None:
    directory = write_byte_tokenizer(tmp_path)
    (directory / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"^{directory}/config.json {message}"):
        Tokenizer.load(directory)


def test_decoder_that_cannot_stream_is_rejected(tmp_path: Path) -> None:
    directory = write_byte_tokenizer(tmp_path)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"ByteLevel, Metaspace .* found \['WordPiece'\]"):
        Tokenizer.load(directory)


@pytest.mark.parametrize(
    ("token", "expected"),
    [("▁tea", b" tea"), ("<0xE8>", b"\xe8"), ("<0xE8>x", b"<0xE8>x"), ("茶", "茶".encode())],
)
def test_sentencepiece_tokens(token: str, expected: bytes) -> None:
    assert token_to_bytes({"type": "Metaspace"})(token) == expected


def test_missing_decoder_is_rejected() -> None:
    with pytest.raises(CheckpointError, match="found no decoder"):
        token_to_bytes(None)
