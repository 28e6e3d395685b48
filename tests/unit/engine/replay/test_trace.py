"""Traces: reading them, generating prompts, and the times at which requests are sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.replay_command import scaled
from mooncake_engine.replay.trace import Pacing, PromptWriter, TraceRequest, read_trace

EXAMPLE = Path(__file__).parents[4] / "examples" / "trace.jsonl"


def written(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(content)
    return path


def test_mooncakes_lines(tmp_path: Path) -> None:
    late = '{"timestamp": 2500, "input_length": 700, "output_length": 9, "hash_ids": [3, 4]}'
    soon = '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [3], "more": 1}'
    assert read_trace(written(tmp_path, f"{late}\n\n{soon}\n")) == [
        TraceRequest(0.0, 5, 1, (3,)),
        TraceRequest(2.5, 700, 9, (3, 4)),
    ]


def test_share_gpt(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "x" * 40},
        {"from": "gpt", "value": "y" * 80},
        {"from": "human", "value": "more"},
    ]
    content = [{"id": "a", "conversations": turns}, {"conversations": turns[1:]}, {"id": "b"}]
    assert read_trace(written(tmp_path, json.dumps(content))) == [
        TraceRequest(None, 10, 20, text="x" * 40)
    ]


def test_l_eval(tmp_path: Path) -> None:
    line = {
        **{"instructions": ["What?", "Why?"], "outputs": ["y" * 8, "z" * 40]},
        **{"input": "x" * 400, "source": "a lecture", "evaluation": "exam"},
    }
    what, why = read_trace(written(tmp_path, f"\n{json.dumps(line)}\n"))
    assert (what.num_output, why.num_output) == (2, 10)
    assert why == TraceRequest(None, 101, 10, text="x" * 400 + "\n\nWhy?")
    assert what.text is not None
    assert what.text.startswith("x" * 400), "questions share their document"


def test_arxiv_summarization(tmp_path: Path) -> None:
    lines = [{"article": name * 4000, "abstract": "s" * 800} for name in "ab"]
    requests = read_trace(written(tmp_path, "\n".join(map(json.dumps, lines))))
    assert [(request.num_input, request.num_output) for request in requests] == [(1005, 200)] * 2
    assert [(request.text or "")[0] for request in requests] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"instructions": ["a"]}', "missing required field `input`"),
        ('{"article": "a", "abstract": 3}', "Expected `str`, got `int`"),
        ("", "contains no requests"),
        ("[]", "contains no requests"),
        ("no json", "is not a trace"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "is not a trace"),
        ('{"timestamp": 0}', "is not a trace"),
    ],
)
def test_an_invalid_trace_is_rejected(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_trace(written(tmp_path, content))


def test_missing_trace_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read the trace .*No such file"):
        read_trace(tmp_path / "none")


def test_example_trace_can_be_replayed() -> None:
    requests = read_trace(EXAMPLE)
    assert len(requests) == 40
    assert all(len(request.block_ids) == -(-request.num_input // 64) for request in requests), (
        "an id for every 64 tokens"
    )
    assert max(request.num_input + request.num_output for request in requests) < 2048


@given(
    first=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    second=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    missing=st.integers(0, 9),
)
def test_equal_blocks_give_equal_prefixes(
    first: list[int], second: list[int], missing: int
) -> None:
    writer = PromptWriter(tokens_per_word=2.0, block_tokens=20)
    prompts = [
        writer.write(TraceRequest(0.0, 20 * len(ids) - 2 * missing, 1, tuple(ids)), index).split()
        for index, ids in enumerate((first, second))
    ]
    assert [len(prompt) for prompt in prompts] == [
        10 * len(first) - missing,
        10 * len(second) - missing,
    ]
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    whole = min(10 * same, *(len(prompt) for prompt in prompts))
    assert prompts[0][:whole] == prompts[1][:whole]
    if same < min(len(first), len(second)) and missing == 0:
        assert prompts[0][whole : whole + 10] != prompts[1][whole : whole + 10]


def test_prompts_without_block_ids_are_unique() -> None:
    request = TraceRequest(0.0, 50, 1)
    assert PromptWriter().write(request, 0) != PromptWriter().write(request, 1)
    assert PromptWriter().write(request, 1) == PromptWriter().write(request, 1)
    assert PromptWriter().write(TraceRequest(None, 2, 1, text="as it is"), 0) == "as it is"


REQUESTS = [TraceRequest(at_s, 10, 4) for at_s in (1.0, 1.0, 3.0)]


@pytest.mark.parametrize(
    ("pacing", "times"),
    [
        (Pacing(), [0.0, 0.0, 2.0]),
        (Pacing(speedup=4.0), [0.0, 0.0, 0.5]),
        (Pacing(concurrency=2), [0.0, 0.0, 0.0]),
    ],
)
def test_pacing_determines_the_send_times(pacing: Pacing, times: list[float]) -> None:
    assert pacing.times_s(REQUESTS) == times


def test_a_rate_is_kept_on_average() -> None:
    times = Pacing(rate=5.0).times_s([TraceRequest(None, 1, 1)] * 4000)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(800.0, rel=0.1)
    assert Pacing(rate=5.0).times_s(REQUESTS) == times[:3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speedup": 0.0}, "--speedup must be more than 0"),
        ({"rate": -1.0}, "--rate must be more than 0"),
        ({"concurrency": 0}, "--concurrency must be more than 0"),
        ({"rate": 1.0, "concurrency": 2}, "exclude each other"),
    ],
)
def test_invalid_pacing_is_rejected(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Pacing(**options)  # type: ignore[arg-type]


def test_a_trace_without_times_needs_a_pace() -> None:
    with pytest.raises(ConfigError, match="use --rate or --concurrency"):
        Pacing().times_s([TraceRequest(None, 1, 1)])


def test_lengths_are_scaled() -> None:
    assert scaled([TraceRequest(0.0, 1000, 3, (1,))], 0.1) == [TraceRequest(0.0, 100, 1, (1,))]
    assert scaled([TraceRequest(None, 5, 5, text="ab" * 10)], 0.2) == [
        TraceRequest(None, 1, 1, text="abab")
    ]
