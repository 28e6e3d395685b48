"""``mooncake-engine run-batch`` against a server of ours."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine, upper_case

from mooncake_api.instance_protocol import BATCH_PRIORITY
from mooncake_engine.errors import ConfigError, Overloaded
from mooncake_engine.messages import EngineRequest
from mooncake_engine.process import batch_runner
from mooncake_engine.process.batch_runner import BatchFailed, BatchRun, authorization, run_batch

Run = Callable[..., str]
FULL = r"can't write --output-file .*: No space left on device; the results in it are complete"


def line(name: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": name, **changes.pop("body", {})}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | changes


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def results(path: Path) -> dict[str, dict[str, Any]]:
    return {one["custom_id"]: one for one in map(json.loads, path.read_text().splitlines())}


@pytest.fixture
def run(served: Any, tmp_path: Path) -> Run:
    def run(*lines: dict[str, Any], **options: Any) -> str:
        source = written(tmp_path / "in.jsonl", *lines)
        batch = BatchRun(served.url, source, tmp_path / "out.jsonl", **options)
        return run_batch(batch, lambda stage, share: None)

    return run


def test_request_file_yields_result_file(run: Run, served: Any, tmp_path: Path) -> None:
    chat = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "x"}]}}
    chat["body"]["model"] = "fake"
    output = run(line("tea"), line("milk", body={"priority": 2000}), {"custom_id": "c", **chat})
    assert output.startswith("3 requests sent, 0 of them failed; 0 had been answered before")
    found = results(tmp_path / "out.jsonl")
    assert found["tea"]["response"]["status_code"] == 200
    assert found["tea"]["response"]["body"]["choices"][0]["text"] == "TEA"
    assert found["tea"]["error"] is None
    assert found["c"]["response"]["body"]["object"] == "chat.completion"
    seen = {bytes(request.prompt_token_ids): request.priority for request in served.engine.seen}
    assert (seen[b"tea"], seen[b"milk"]) == (BATCH_PRIORITY, 2000)


def test_interrupted_run_resumes(run: Run, served: Any, tmp_path: Path) -> None:
    run(line("tea"))
    with (tmp_path / "out.jsonl").open("a") as torn:
        torn.write('{"custom_id": "milk", "respo')
    output = run(line("tea"), line("milk"))
    assert output.startswith("1 requests sent, 0 of them failed; 1 had been answered before")
    assert [bytes(r.prompt_token_ids) for r in served.engine.seen] == [b"tea", b"milk"]
    assert set(results(tmp_path / "out.jsonl")) == {"tea", "milk"}


def test_first_result_that_is_torn_is_replaced(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"id":"batch_req_tea","custom_')
    run(line("tea"))
    assert set(results(tmp_path / "out.jsonl")) == {"tea"}


@pytest.mark.parametrize(
    "content", ['{"note": "buy milk"}', '{"note": "buy milk"}\n', json.dumps(line("tea")), "x\ny"]
)
def test_file_of_another_kind_is_left_as_it_is(
    run: Run, served: Any, tmp_path: Path, content: str
) -> None:
    """Such as the input file, given as the output file by mistake."""
    (tmp_path / "out.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="has a line that is no result"):
        run(line("tea"))
    assert (tmp_path / "out.jsonl").read_text() == content
    assert not served.engine.seen


def test_input_file_is_no_output_file(served: Any, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", line("tea"))
    before = source.read_text()
    with pytest.raises(ConfigError, match="has a line that is no result"):
        run_batch(BatchRun(served.url, source, source), lambda stage, share: None)
    assert source.read_text() == before


def test_rejected_request_is_retried_until_accepted(run: Run, served: Any) -> None:
    engine: FakeEngine = served.engine
    engine.refusal = Overloaded("too many")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 7:
            engine.refusal = None

    assert "0 of them failed" in run(line("tea"), max_attempts=2, pause=pause)
    assert len(pauses) == 7
    assert all(0 < seconds <= 60 for seconds in pauses)


def test_failed_requests_are_reported_and_retried(run: Run, served: Any, tmp_path: Path) -> None:
    def fail_milk(request: EngineRequest) -> list[int]:
        if bytes(request.prompt_token_ids) == b"milk":
            raise RuntimeError("sour")
        return upper_case(request)

    served.engine.script = fail_milk
    wrong = line("wrong", body={"temperature": "hot"})
    pauses: list[float] = []
    with pytest.raises(BatchFailed, match="3 requests sent, 2 of them failed"):
        run(line("tea"), line("milk"), wrong, max_attempts=3, pause=pauses.append)
    found = results(tmp_path / "out.jsonl")
    assert found["wrong"]["response"]["status_code"] == 400
    assert found["milk"]["response"]["status_code"] == 500
    assert len(pauses) == 2, "three attempts of the request with a retryable error"
    served.engine.script = upper_case
    run(line("tea"), line("milk"))
    assert results(tmp_path / "out.jsonl")["milk"]["response"]["status_code"] == 200


def test_unreachable_server_yields_no_result(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", line("tea"))
    batch = BatchRun("http://127.0.0.1:9", source, tmp_path / "out.jsonl", max_attempts=1)
    with pytest.raises(BatchFailed):
        run_batch(batch, lambda stage, share: None)
    [found] = results(tmp_path / "out.jsonl").values()
    assert found["response"] is None
    assert found["error"]["code"] == "no_answer"


def test_server_that_has_vanished_is_noticed_without_a_limit_on_responses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets: list[socket.socket] = []
    real = http.client.HTTPConnection.getresponse

    def getresponse(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        sock = connection.sock
        sockets.append(sock)
        assert sock.gettimeout() is None
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        return real(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", getresponse)
    run(line("tea"))
    assert len(sockets) == 1


def test_full_disk_ends_the_run_and_keeps_whole_results(
    run: Run, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one request computes for ever, another one's result does not fit."""

    class FullDisk(FileIO):
        def write(self, content: Any) -> int:
            if len(content) > 20:
                return super().write(content[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

    run(line("first"))
    served.engine.hold_at = 5  # a token that only the longest prompt's answer has
    monkeypatch.setattr(batch_runner, "FileIO", FullDisk)
    with pytest.raises(BatchFailed, match=FULL):
        run(line("forever"), *(line(str(at)) for at in range(200)), concurrency=2)
    monkeypatch.undo()
    assert set(results(tmp_path / "out.jsonl")) == {"first"}
    assert len(served.engine.seen) < 10, "what can't be recorded is not computed"
    assert run(line("first"), line("milk")).startswith("1 requests sent, 0 of them failed")


def test_priority_of_another_type_fails_its_request_alone(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match="2 requests sent, 1 of them failed"):
        run(line("tea"), line("milk", body={"priority": "high"}), max_attempts=1)
    found = results(tmp_path / "out.jsonl")["milk"]["response"]
    assert found["status_code"] == 400
    assert found["body"]["error"]["param"] == "priority"


def test_host_that_is_no_name_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", line("tea"))
    with pytest.raises(ConfigError, match=r"--url must be .*, got 'http://a\.\.b'"):
        BatchRun("http://a..b", source, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    "body", [b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_line_that_cannot_be_decoded_is_rejected(tmp_path: Path, body: bytes) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"custom_id": "a", "url": "/v1/completions", "body": %b}' % body)
    with pytest.raises(ConfigError, match="line 1 is no valid batch request: "):
        run_batch(BatchRun("http://x", source, tmp_path / "out.jsonl"), lambda stage, share: None)


@pytest.mark.parametrize(("key", "sent"), [("", None), (" abc\n", "Bearer abc")])
def test_api_key_is_sent(monkeypatch: pytest.MonkeyPatch, key: str, sent: str | None) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    assert authorization().get("Authorization") == sent


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_api_key_that_no_header_can_have_is_rejected(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY must be one line of ASCII characters"):
        authorization()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "contains no requests"),
        ([{"custom_id": "a"}], r"line 1 is no valid batch request: .*missing required field"),
        ([line("a"), line("a")], r"line 2 \(a\): its custom_id is not unique in the file"),
        ([line("a", method="GET")], "wanted POST to /v1/completions or"),
        ([line("a", url="/v1/embeddings")], "got POST /v1/embeddings"),
        ([line("a", body={"stream": True})], "streaming is not supported in a batch"),
    ],
)
def test_invalid_file_is_rejected_before_any_request(
    run: Run, served: Any, lines: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*lines)
    assert not served.engine.seen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://x"}, "--url must be"),
        ({"url": "http://x:y"}, "--url must be"),
        ({"concurrency": 0}, "--concurrency must be at least"),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BatchRun(**{"url": "http://x", "input_file": tmp_path, "output_file": tmp_path, **options})
