"""The datasets of ``bench serve``: vLLM's random, sharegpt, sonnet and custom.

The same options give the same lengths and the same kind of text as in vLLM. The random numbers
differ, so that the same seed gives other prompts than in vLLM.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.prompt_tokenizer import PromptTokenizer
from mooncake_engine.replay.trace import TraceRequest

_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"
_SHARE_GPT_MAX_PROMPT = 1024
_SHARE_GPT_MAX_TOTAL = 2048
_SHARE_GPT_MIN = 4


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset with its options. Lengths are in tokens.

    Args:
        name: the name of the dataset in ``DATASETS``.
        path: the dataset's file; None for ``random``.
        num_prompts: the number of requests.
        num_input, num_output: tokens of prompt and answer per request; None takes the output
            length from the dataset.
        num_prefix: tokens of the prefix that all prompts share.
        range_ratio: how far random lengths may deviate from the given ones, as a share of them.
        seed: the seed of prompts, lengths and order.
        is_shuffled: whether the entries of the file are shuffled.
        repeats: whether entries are reused if the file has too few.
        is_chat: whether prompts are sent to a chat endpoint, which applies the chat template.
        has_template: whether the chat template is applied here, for other endpoints.
    """

    name: str
    path: Path | None
    num_prompts: int
    num_input: int
    num_output: int | None
    num_prefix: int = 0
    range_ratio: float = 0.0
    seed: int = 0
    is_shuffled: bool = True
    repeats: bool = True
    is_chat: bool = False
    has_template: bool = True

    def requests(self, tokenizer: PromptTokenizer) -> list[TraceRequest]:
        """The requests, in the order in which they are sent.

        Raises:
            ConfigError: the options contradict each other, or the file does not have the dataset's
                format.
        """
        if self.num_prompts < 1:
            raise ConfigError(f"--num-prompts must be at least 1, got {self.num_prompts}")
        found = list(DATASETS[self.name](self, tokenizer, random.Random(self.seed)))
        if not found:
            raise ConfigError(f"{self.path} contains no usable request")
        if self.repeats and len(found) < self.num_prompts:
            found += random.Random(self.seed).choices(found, k=self.num_prompts - len(found))
        return found[: self.num_prompts]

    def file(self) -> Path:
        """The dataset's file; raises ConfigError if none is given."""
        if self.path is None:
            raise ConfigError(f"--dataset-name {self.name} needs --dataset-path")
        return self.path

    def rendered(self, prompt: str, tokenizer: PromptTokenizer) -> str:
        """A prompt as it is sent: with the chat template if it is applied here."""
        if self.is_chat or not self.has_template:
            return prompt
        return tokenizer.as_chat(prompt)


def _random(
    dataset: Dataset, tokenizer: PromptTokenizer, numbers: random.Random
) -> Iterator[TraceRequest]:
    """Prompts of consecutive tokens of the vocabulary, starting at a random one."""
    if dataset.path is not None:
        raise ConfigError("--dataset-name random reads no file: remove --dataset-path")
    ratio, num_output = dataset.range_ratio, dataset.num_output or 0
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {ratio:g}")
    num_input = max(0, dataset.num_input - tokenizer.num_added)
    if dataset.num_prefix + math.floor(num_input * (1 - ratio)) < 1:
        raise ConfigError(
            f"--random-input-len {dataset.num_input} leaves no token for a prompt: the tokenizer "
            f"adds {tokenizer.num_added}, and --random-range-ratio is {ratio:g}"
        )
    ids = tokenizer.ordinary_ids
    prefix = numbers.choices(ids, k=dataset.num_prefix)
    for index in range(dataset.num_prompts):
        length, longest = (_about(of, ratio, numbers) for of in (num_input, num_output))
        start = numbers.randrange(len(ids)) + index
        inner = [ids[(start + i) % len(ids)] for i in range(length)]
        text = tokenizer.text_of_length([*prefix, *inner], numbers)
        yield TraceRequest(None, tokenizer.count(text), max(longest, 1), text=text)


def _about(length: int, ratio: float, numbers: random.Random) -> int:
    return numbers.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio)))


def _share_gpt(
    dataset: Dataset, tokenizer: PromptTokenizer, numbers: random.Random
) -> Iterator[TraceRequest]:
    """The first two turns of each conversation, except very short and long ones."""
    entries = [entry for entry in _json(dataset.file()) if len(_turns(entry)) >= 2]
    if dataset.is_shuffled:
        numbers.shuffle(entries)
    num_found = 0
    for entry in entries:
        prompt, answer = (_text(turn) for turn in _turns(entry)[:2])
        num_input = tokenizer.count(prompt)
        num_output = dataset.num_output or tokenizer.count(answer)
        is_short = num_input < _SHARE_GPT_MIN or (
            dataset.num_output is None and num_output < _SHARE_GPT_MIN
        )
        is_long = num_input > _SHARE_GPT_MAX_PROMPT or num_input + num_output > _SHARE_GPT_MAX_TOTAL
        if is_short or is_long:
            continue
        yield TraceRequest(None, num_input, num_output, text=prompt)
        num_found += 1
        if num_found == dataset.num_prompts:
            return


def _turns(entry: Any) -> list[Any]:
    found = entry.get("conversations") if isinstance(entry, dict) else None
    return found if isinstance(found, list) else []


def _text(turn: Any) -> str:
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise ConfigError(f"a ShareGPT turn has no text in 'value': {str(turn)[:80]}")
    return str(turn["value"])


def _json(path: Path) -> list[Any]:
    try:
        found = msgspec.json.decode(_content(path))
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--dataset-path: {path} is not valid JSON: {exc}") from exc
    if not isinstance(found, list):
        raise ConfigError(f"--dataset-path: {path} must contain a list of conversations")
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"--dataset-path: can't read {path}: {exc.strerror}") from exc


def _sonnet(
    dataset: Dataset, tokenizer: PromptTokenizer, numbers: random.Random
) -> Iterator[TraceRequest]:
    """Random lines of a poem after a fixed prefix."""
    lines = _content(dataset.file()).decode(errors="replace").splitlines(keepends=True)
    if not lines:
        raise ConfigError(f"--dataset-path: {dataset.path} contains no lines")
    per_line = sum(tokenizer.count(line) for line in lines) / len(lines)
    num_fixed = tokenizer.count(dataset.rendered(_SONNET_TASK, tokenizer))
    num_prefix = max(round((dataset.num_prefix - num_fixed) / per_line), 0)
    num_lines = int((dataset.num_input - num_fixed) / per_line)
    if num_lines < max(num_prefix, 1):
        raise ConfigError(
            f"--sonnet-input-len {dataset.num_input} is too short for the task's {num_fixed} "
            f"tokens and --sonnet-prefix-len {dataset.num_prefix}"
        )
    fixed, num_tries = lines[:num_prefix], 0
    num_found = 0
    while num_found < dataset.num_prompts and num_tries < 100 * dataset.num_prompts:
        num_tries += 1
        chosen = fixed + numbers.choices(lines, k=num_lines - num_prefix)
        prompt = dataset.rendered(_SONNET_TASK + "".join(chosen), tokenizer)
        num_input = tokenizer.count(prompt)
        if num_input <= dataset.num_input:
            num_found += 1
            yield TraceRequest(None, num_input, dataset.num_output or 1, text=prompt)


class _CustomLine(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


def _custom(
    dataset: Dataset, tokenizer: PromptTokenizer, numbers: random.Random
) -> Iterator[TraceRequest]:
    """The prompts of a file of JSON lines, each with a ``prompt``."""
    lines = [line for line in _content(dataset.file()).splitlines() if line.strip()]
    try:
        entries = [msgspec.json.decode(line, type=_CustomLine) for line in lines]
    except msgspec.DecodeError as exc:
        raise ConfigError(
            f"--dataset-path: {dataset.path} must contain JSON lines with a string 'prompt': {exc}"
        ) from exc
    if dataset.is_shuffled:
        numbers.shuffle(entries)
    for entry in entries[: dataset.num_prompts]:
        prompt = dataset.rendered(entry.prompt, tokenizer)
        num_output = dataset.num_output if (dataset.num_output or -1) > 0 else entry.output_tokens
        if num_output is None:
            raise ConfigError(
                "--custom-output-len -1 needs output_tokens in every line, and one has none"
            )
        yield TraceRequest(None, tokenizer.count(prompt), num_output, text=prompt)


DATASETS: dict[str, Callable[[Dataset, PromptTokenizer, random.Random], Iterable[TraceRequest]]] = {
    "random": _random,
    "sharegpt": _share_gpt,
    "sonnet": _sonnet,
    "custom": _custom,
}
"""The generator of each dataset, by the dataset's name in vLLM."""
