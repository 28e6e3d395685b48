"""Grammars that never finish compiling, or crash the compiler, kill only their own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mooncake_engine.errors import InvalidRequest, RequestFailed
from mooncake_engine.sampling_params import Grammar, GrammarKind
from mooncake_engine.text.grammar_compiler import TokenTable
from mooncake_engine.text.grammar_process import CompileLimits, GrammarProcess
from mooncake_engine.text.grammars import Vocabulary, json_schema_grammar
from mooncake_engine.text.tokenizer import Tokenizer

TABLE = TokenTable((*(bytes([i]) for i in range(256)), b""), (256,), (256,))
PATIENT = CompileLimits(wall_s=120.0, start_s=120.0)
"""Seconds of wall-clock time, generous because the machine may be busy."""
FINE = Grammar(GrammarKind.REGEX, "[a-c]+")
NESTED = 20_000


ENDLESS = json_schema_grammar(
    {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949, 9941)]}
)
"""145 characters that compile for minutes."""
CRASHING = Grammar(
    GrammarKind.LARK,
    "start: r0\n"
    + "\n".join(f"r{i}: r{i + 1} | r{i + 2} r{i + 1}" for i in range(9000))
    + '\nr9000: "a"\nr9001: "b"\n',
)
"""Overflows the compiler's stack."""
BOMBS = {
    "divisors": ENDLESS,
    "rules": CRASHING,
    "options": Grammar(GrammarKind.REGEX, "(a?)" * 20_000 + "a" * 20_000),
    "classes": Grammar(GrammarKind.REGEX, r"(\p{L}|\w|\W)*" * 8000),
    "patterns": json_schema_grammar(
        {
            "allOf": [
                {"type": "string", "pattern": f"(a|b)*{chr(97 + i % 26)}(a|b){{{i}}}"}
                for i in range(60)
            ]
        }
    ),
}
HARMLESS = {
    "nested groups": Grammar(GrammarKind.REGEX, "(" * NESTED + "a" + ")" * NESTED),
    "nested Lark": Grammar(GrammarKind.LARK, "start: " + "(" * NESTED + '"a"' + ")" * NESTED),
    "nested schema": Grammar(
        GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * NESTED + "true" + "}" * NESTED
    ),
    "repetitions": Grammar(GrammarKind.REGEX, "(" * 6 + "a" + "{1,1000}){1,1000}" * 6),
    "states": Grammar(GrammarKind.LARK, "start: T\nT: ~/(a|b)*a(a|b){25}/\n"),
}
"""The library's own limits are enough."""


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess(TABLE, PATIENT)
    yield process
    process.close()


def child_of(process: GrammarProcess) -> int:
    process.check(FINE)
    assert process._child is not None
    return process._child.pid


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_kills_only_its_process_and_the_next_grammar_compiles(
    process: GrammarProcess, name: str
) -> None:
    before = child_of(process)
    with pytest.raises(InvalidRequest, match=r"takes more than 1 s, or more memory or nesting"):
        process.check(BOMBS[name])
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert child_of(process) != before


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_large_but_cheap_grammar_kills_nothing(process: GrammarProcess, name: str) -> None:
    before = child_of(process)
    with suppress(InvalidRequest):
        process.check(HARMLESS[name])
    assert child_of(process) == before


@pytest.mark.timeout(300)
def test_a_child_that_does_not_reply_is_killed() -> None:
    process = GrammarProcess(TABLE, CompileLimits(cpu_s=600, wall_s=0.5, start_s=120.0))
    with pytest.raises(InvalidRequest, match="SIGKILL"):
        process.check(ENDLESS)
    assert process._child is None


@pytest.mark.timeout(300)
def test_a_bomb_sent_again_is_not_compiled(process: GrammarProcess) -> None:
    with pytest.raises(InvalidRequest) as first:
        process.check(ENDLESS)
    before = child_of(process)
    with pytest.raises(InvalidRequest) as second:
        process.check(ENDLESS)
    assert str(second.value) == str(first.value)
    assert child_of(process) == before


@pytest.mark.timeout(300)
def test_a_child_that_was_killed_is_replaced(process: GrammarProcess) -> None:
    before = child_of(process)
    os.kill(before, signal.SIGKILL)
    assert process._child is not None
    process._child.wait(60)
    assert child_of(process) != before


def hung(process: GrammarProcess) -> subprocess.Popen[bytes]:
    """Give the process a child that reads a grammar and then never replies."""
    child = subprocess.Popen(
        ["sh", "-c", "head -c 4 >/dev/null; echo read >&2; exec sleep 600"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process._child = child
    return child


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_grammar_whose_child_was_killed_from_outside_is_compiled_again(number: int) -> None:
    """As by the kernel of a host that is out of memory; but not for ever."""
    process = GrammarProcess(TABLE, PATIENT)

    def killed() -> None:
        with hung(process) as child, ThreadPoolExecutor(1) as thread:
            check = thread.submit(process.check, FINE)
            assert child.stderr is not None
            assert child.stderr.readline() == b"read\n"
            child.send_signal(number)
            check.result()

    for _ in range(2):
        for _ in range(2):
            with pytest.raises(RequestFailed, match=r"killed from outside \(SIG.*request again"):
                killed()
        process.check(FINE)
        process.close()
    for _ in range(2):
        with pytest.raises(RequestFailed):
            killed()
    with pytest.raises(InvalidRequest, match="is rejected"):
        killed()
    with pytest.raises(InvalidRequest, match="is rejected"):
        process.check(FINE)
    assert process._child is None


@pytest.mark.timeout(300)
def test_a_grammar_that_got_no_reply_in_time_is_compiled_again() -> None:
    """The machine may have been busy."""
    process = GrammarProcess(TABLE, CompileLimits(wall_s=0.01, start_s=120.0))
    with hung(process), pytest.raises(InvalidRequest, match="SIGKILL"):
        process.check(FINE)
    process._limits = PATIENT
    process.check(FINE)
    process.close()


def test_a_child_that_reads_no_more_is_replaced() -> None:
    """As one that the kernel kills between the check that it lives and the write."""
    process = GrammarProcess(TABLE)
    deaf = ["sh", "-c", "exec <&-; echo deaf; exec sleep 600"]
    child = subprocess.Popen(deaf, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"deaf\n"
    process._child = child
    with pytest.raises(InvalidRequest, match="SIGKILL"):
        process.check(FINE)
    assert process._child is None
    assert child.returncode == -signal.SIGKILL


@pytest.mark.timeout(300)
def test_grammars_compile_in_a_server_with_thousands_of_connections() -> None:
    """``select`` knows no descriptors above 1023."""
    process = GrammarProcess(TABLE, PATIENT)
    with ExitStack() as connections:
        connections.callback(process.close)
        least = os.open(os.devnull, os.O_RDONLY)
        connections.callback(os.close, least)
        while least < 1024:
            least = os.dup(least)
            connections.callback(os.close, least)
        process.check(FINE)


def test_a_child_that_does_not_read_its_vocabulary_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    tokens = TokenTable((bytes(1 << 20),), (), ())  # more than a pipe holds
    process = GrammarProcess(tokens, CompileLimits(start_s=0.2))
    with ThreadPoolExecutor(1) as threads:
        checking = threads.submit(process.check, FINE)
        try:
            with pytest.raises(RequestFailed, match="did not start"):
                checking.result(10)
        finally:
            if process._child is not None:
                process._child.kill()


def test_an_invalid_grammar_is_rejected_with_the_librarys_message(process: GrammarProcess) -> None:
    before = child_of(process)
    words = r'^the regular expression is rejected: .*invalid regex "\(".*: unclosed group$'
    with pytest.raises(InvalidRequest, match=words):
        process.check(Grammar(GrammarKind.REGEX, "("))
    assert child_of(process) == before


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(a|aa)+" * 200 + "$"),
        json_schema_grammar({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ],
    ids=["expressions", "recursion"],
)
def test_a_grammar_that_fails_at_the_first_token_is_rejected(
    process: GrammarProcess, grammar: Grammar
) -> None:
    with pytest.raises(InvalidRequest, match="is rejected"):
        process.check(grammar)


@pytest.mark.timeout(300)
def test_the_child_exits_with_its_parent() -> None:
    process = GrammarProcess(TABLE, PATIENT)
    process.check(FINE)
    child = process._child
    assert child is not None
    process.close()
    assert child.returncode is not None
    process.close()


def test_the_cache_of_grammars_is_bounded_by_size(byte_tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(byte_tokenizer, 258, (256,))
    large = [Grammar(GrammarKind.REGEX, f"{i}" + "a" * 400_000) for i in range(6)]
    for grammar in [FINE, *large]:
        vocabulary.matcher(grammar)
    assert vocabulary.has_compiled(large[-1])
    assert not vocabulary.has_compiled(FINE)
    assert sum(map(vocabulary.has_compiled, large)) == 5
