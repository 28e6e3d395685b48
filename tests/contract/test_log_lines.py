"""Log lines in JSON: engine, store and proxy write the same fields."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from mooncake_engine.process.child_processes import json_line
from mooncake_hal.command_line import JsonLogLines, LogSettings
from mooncake_proxy.ops.background_stderr import JsonLogLines as ProxyLogLines

BEGIN = {
    "instances": 'from mooncake_hal.command_line import *; LogSettings(20, "json").apply()',
    "proxy": 'from mooncake_proxy.ops.background_stderr import *; begin_log("info", "json")',
}


def record_of(message: str, *values: Any, error: Any = None) -> logging.LogRecord:
    return logging.LogRecord("a.b", logging.WARNING, __file__, 1, message, values, error)


@pytest.mark.parametrize("message", ["two\nlines", 'a "quoted" %s', "half a character \ud83c"])
def test_engine_and_proxy_write_the_same_line(message: str) -> None:
    record = record_of(message, *(["text"] if "%s" in message else []))
    lines = {each().format(record) for each in (JsonLogLines, ProxyLogLines)}
    [line] = lines
    assert "\n" not in line
    found = json.loads(line)
    assert found == {
        "time": round(record.created, 3),
        "level": "WARNING",
        "logger": "a.b",
        "message": record.getMessage(),
    }


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("out of luck")
    except ValueError:
        record = record_of("failed", error=sys.exc_info())
    for each in (JsonLogLines, ProxyLogLines):
        found = json.loads(each().format(record))
        assert found["message"] == "failed"
        assert found["exception"].endswith("ValueError: out of luck")


@pytest.mark.parametrize("who", BEGIN)
def test_a_process_writes_json_lines_only(who: str) -> None:
    code = f"""
import logging, warnings
{BEGIN[who]}
logging.getLogger("x").info("hello")
logging.getLogger("x").debug("unseen")
warnings.warn("old")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = map(json.loads, ran.stderr.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "x", "hello")
    assert "old" in second["message"]


def test_settings_are_inherited_by_child_processes() -> None:
    code = """
from mooncake_hal.command_line import LogSettings
LogSettings(30, "json").apply()
print(LogSettings.current())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == repr(LogSettings(30, "json"))


def test_lines_of_a_deployment_name_their_process() -> None:
    own = JsonLogLines().format(record_of("hello"))
    assert json.loads(json_line("proxy", own)) == {"process": "proxy", **json.loads(own)}
    for text in ("ready http://127.0.0.1:1", "17", "{", "[1]"):
        found = json.loads(json_line("decode-0", text))
        assert (found["process"], found["level"], found["message"]) == ("decode-0", "INFO", text)
