"""Train the byte-level Llama in ``examples/tiny-llama`` and write it there, in Hugging Face form.

The model memorises the page (it continues any excerpt to the end of the page) and the questions and
answers of ``chat.json``, and it learns to recall a password that was mentioned long before the
question. The password depends on *distant* KV, the other two mostly on recent KV; together they
make errors in a transferred KV cache visible in the text.

    python examples/train_tiny_llama.py            # some 15 minutes on one CPU core

The tokenizer has no merges: token id = byte value, and the special tokens follow from 256 on.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODEL_DIR = Path(__file__).parent / "tiny-llama"
PAD, EOS, IM_START, IM_END = range(256, 260)
SPECIAL_TOKENS = {PAD: "<|pad|>", EOS: "<|eos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
VOCAB_SIZE = 272  # 260 used, padded to a multiple of 16
MAX_TOKENS = 2048
IGNORED = -100  # the label that cross_entropy skips
UNSCORED_HEAD = 12  # the first bytes of a random excerpt cannot be predicted
SYSTEM_MESSAGE = "You are a helpful assistant."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

log = logging.getLogger("train_tiny_llama")


@dataclass(frozen=True)
class Sample:
    """One training sequence: ``ids`` and, per position, whether it counts in the loss."""

    ids: list[int]
    scored: list[bool]


@dataclass(frozen=True)
class Stage:
    """A stage of the training, with batches of ``batch`` sequences of at most ``tokens`` ids.

    ``start`` is the fraction of all steps at which the stage begins.
    """

    start: float
    tokens: int
    batch: int


STAGES = (Stage(0.0, 256, 9), Stage(0.55, 768, 3), Stage(0.85, MAX_TOKENS, 2))


class ChatFile(TypedDict):
    """The content of ``chat.json``: the answer to each question, and the passwords to recall."""

    answers: dict[str, str]
    passwords: list[str]


class Corpus:
    """Generates samples from the page and the chat file, reproducibly for the same seed."""

    def __init__(self, page: str, chat: ChatFile, seed: int) -> None:
        self._page = page
        self._cycle = [*page.encode(), EOS]
        self._answers = list(chat["answers"].items())
        self._passwords = chat["passwords"]
        self._random = random.Random(seed)

    def batch(self, stage: Stage) -> list[Sample]:
        """Generate ``stage.batch`` samples: half of them excerpts of the page, the others
        conversations."""
        kinds: tuple[Callable[[int], Sample], ...] = (
            self._cut,
            self._conversation,
            self._cut,
            self._recall,
        )
        return [self._random.choice(kinds)(stage.tokens) for _ in range(stage.batch)]

    def _cut(self, tokens: int) -> Sample:
        """An excerpt of the endlessly repeated page, starting at a random byte."""
        start = self._random.randrange(len(self._cycle))
        ids = [self._cycle[(start + i) % len(self._cycle)] for i in range(tokens)]
        return Sample(ids, [i >= UNSCORED_HEAD for i in range(tokens)])

    def _conversation(self, tokens: int) -> Sample:
        """As many random questions with their answers as fit."""
        turns = self._system()
        while True:
            question, answer = self._random.choice(self._answers)
            longer = [*turns, ("user", question), ("assistant", answer)]
            if len(render(longer).ids) > tokens:
                return render(turns)
            turns = longer

    def _recall(self, tokens: int) -> Sample:
        """A password, a part of the page of random length, and the question for the password."""
        password = self._random.choice(self._passwords)
        start = self._random.randrange(len(self._page))
        room = max(tokens - 200, 0)
        piece = self._page[start : start + self._random.randrange(room)]
        story = f"The password is {password}.\n\n{piece}\n\nWhat is the password?"
        return render([*self._system(), ("user", story), ("assistant", f"It is {password}.")])

    def _system(self) -> list[tuple[str, str]]:
        return [("system", SYSTEM_MESSAGE)] if self._random.random() < 0.3 else []


def render(turns: list[tuple[str, str]]) -> Sample:
    """The ids of a conversation in the chat template's format; only answers are scored."""
    ids: list[int] = []
    scored: list[bool] = []
    for role, content in turns:
        head = [IM_START, *f"{role}\n".encode()]
        body = [*content.encode(), IM_END]
        ids += [*head, *body, ord("\n")]
        scored += [False] * len(head) + [role == "assistant"] * len(body) + [False]
    return Sample(ids, scored)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: ids 0 to 255 are bytes, then the special tokens."""
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS.values()]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[EOS],
        pad_token=SPECIAL_TOKENS[PAD],
        additional_special_tokens=[SPECIAL_TOKENS[IM_START], SPECIAL_TOKENS[IM_END]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def byte_letters() -> Iterator[str]:
    """The letter that represents each byte, 0 to 255, in a byte-level vocabulary.

    Printable Latin-1 bytes represent themselves, the others are numbered from U+0100 (as in GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = 0x100
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(spare)
            spare += 1


def build_model() -> LlamaForCausalLM:
    """An untrained Llama of 0.77 M parameters with grouped-query attention (8 heads on 4)."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[EOS, IM_END],
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, samples: list[Sample]) -> Tensor:
    """Mean cross entropy in nats, per sample and then over all samples, so that short answers have
    the same weight as long ones."""
    width = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), width), PAD)
    labels = torch.full((len(samples), width), IGNORED)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        wanted = [i if s else IGNORED for i, s in zip(sample.ids, sample.scored, strict=True)]
        labels[row, : len(wanted)] = torch.tensor(wanted)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [samples, width - 1, vocab]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    counted = (labels[:, 1:] != IGNORED).sum(dim=1).clamp(min=1)
    return (losses.sum(dim=1) / counted).mean()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 50 steps, then a cosine down to a hundredth of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return peak * min(1.0, (step + 1) / 50) * max(cosine, 0.01)


def train(model: LlamaForCausalLM, corpus: Corpus, steps: int, peak: float) -> None:
    """Train the model in place for ``steps`` steps, through all stages, and log the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    running = 0.0
    for step in range(steps):
        stage = [stage for stage in STAGES if stage.start <= step / steps][-1]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        loss = loss_of(model, corpus.batch(stage))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            log.info("step %d of %d, %d tokens wide: loss %.4f", step, steps, stage.tokens, running)


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bfloat16, configs and tokenizer to ``folder``."""
    model.bfloat16().save_pretrained(folder)
    GenerationConfig(  # type: ignore[no-untyped-call]  # untyped in transformers
        do_sample=False, eos_token_id=[EOS, IM_END], pad_token_id=PAD
    ).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # transformers 4 knows only this name
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train a model on the page and the chat file in examples/tiny-llama, and save it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    page = (MODEL_DIR / "page.txt").read_text(encoding="utf-8").rstrip("\n")
    chat: ChatFile = json.loads((MODEL_DIR / "chat.json").read_text(encoding="utf-8"))
    model = build_model()
    train(model, Corpus(page, chat, arguments.seed), arguments.steps, arguments.learning_rate)
    save(model, arguments.out)


if __name__ == "__main__":
    main()
