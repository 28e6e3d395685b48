"""Small tokenizers for tests in Hugging Face's format: one token per byte, no merges."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_byte_tokenizer(
    directory: Path, *, chat_template: str | None = CHAT_TEMPLATE, vocab_size: int = 258
) -> Path:
    """Write a tokenizer whose token id is the byte's value. 256 is ``<|eos|>`` and 257
    ``<|note|>``, an added token that is not special. Ids from there up to the vocabulary's size are
    words that occur in no text."""
    words = {character: byte for byte, character in enumerate(_byte_characters())}
    if vocab_size > EOS + 2:  # added tokens follow all words, unless they are words, too
        words |= {"<|eos|>": EOS, "<|a note|>": EOS + 1}
        words |= {f"Ġw{number}": number for number in range(EOS + 2, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|eos|>", special=True)])
    tokenizer.add_tokens([AddedToken("<|a note|>", special=False)])
    return _save(tokenizer, directory, chat_template)


def write_fallback_tokenizer(directory: Path) -> Path:
    """Write a tokenizer like SentencePiece's: letters and spaces have tokens, everything else falls
    back to bytes. A byte's token id is its value + 3; letters follow."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _save(tokenizer, directory, None)


def _save(tokenizer: Tokenizer, directory: Path, chat_template: str | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)
    fast.save_pretrained(directory)
    return directory


def _byte_characters() -> list[str]:
    """GPT-2's printable character of each byte, in the order of the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]
