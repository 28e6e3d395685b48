#!/usr/bin/env python3
"""Runs Claude Code and Codex against our servers: one turn with a tool call, one with a real model.

In the first turn, each agent calls one of its own tools and finishes; in the second, each gets a
real model's answer from a prefill and a decode instance. The agents come from npm, in the versions
below. The tool turn uses a proxy in front of an instance with a scripted engine, since it tests the
agents' requests and our streams. SmolLM2 (see ci/example_model.py) calls no tools and has a context
of 8,192 tokens, so there the agents get one-line instructions. Each agent gets its own home
directory, and no network except this machine's proxy. Exits 0 only if all turns succeed, 77 if
there is no npm or a download fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import httpx  # noqa: E402  # the path is set above
from support.asgi_server import serving_app  # noqa: E402
from support.byte_tokenizer import write_byte_tokenizer  # noqa: E402
from support.fake_engine import EOS, FakeEngine  # noqa: E402
from support.programs import running  # noqa: E402

from mooncake_engine.messages import EngineRequest  # noqa: E402
from mooncake_engine.server.app import create_app  # noqa: E402
from mooncake_engine.text.tokenizer import Tokenizer  # noqa: E402

AGENTS = ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0")
FOLDER = ROOT / ".cache" / "agents"
SAID = "tea-is-ready"
COMMAND = f"echo {SAID}"
TIMEOUT_S = 120.0
FETCH_TIMEOUT_S = 600.0
SHORTLY = "You answer in one sentence."
QUESTION = "What is the capital of France?"
TEMPLATE = (
    "{% if tools %}# Tools: <tool_call>{% for tool in tools %}{{ tool.function.name }} "
    "{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|end|>"
)
CALLS = {
    "exec_command": f'{{"name": "exec_command", "arguments": {{"cmd": "{COMMAND}"}}}}',
    "Bash": f'{{"name": "Bash", "arguments": {{"command": "{COMMAND}", "description": "tea"}}}}',
}
CODEX_CONFIG = """
model = "agents-model"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
"""
CODEX_SHORTLY = """
model_instructions_file = "{home}/instructions.md"
web_search = "disabled"
"""


def script(request: EngineRequest) -> list[int]:
    """The scripted engine: calls the agent's shell tool, then repeats the tool's output."""
    prompt = bytes(request.prompt_token_ids).decode(errors="replace")
    _, found, result = prompt.rpartition("<|tool|>")
    if found:
        text = f"The tool said: {result.removesuffix('<|end|>')}"
    else:
        call = next(call for name, call in CALLS.items() if name in prompt)
        text = f"At once.\n<tool_call>\n{call}\n</tool_call>"
    return [*text.encode(), EOS]


def fetch() -> bool:
    """Install the agents once; returns False if that fails."""
    wanted = FOLDER / ".installed"
    if wanted.is_file() and wanted.read_text() == "\n".join(AGENTS):
        return True
    npm = shutil.which("npm")
    if npm is None:
        print("skipped: no npm")
        return False
    FOLDER.mkdir(parents=True, exist_ok=True)
    print(f"fetching {', '.join(AGENTS)} (some 600 MB, once)", flush=True)
    install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), *AGENTS]
    try:
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL, timeout=FETCH_TIMEOUT_S)
        native = FOLDER / "node_modules" / "@anthropic-ai" / "claude-code" / "install.cjs"
        subprocess.run(["node", str(native)], check=True, timeout=FETCH_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as exc:
        print(f"skipped: the agents can't be installed: {exc}")
        return False
    wanted.write_text("\n".join(AGENTS))
    return True


def turn(name: str, arguments: Sequence[str], home: Path, variables: Mapping[str, str]) -> str:
    """Run an agent's turn; returns its output, empty and with a message if the turn failed."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    try:
        ran = subprocess.run(
            [str(FOLDER / "node_modules" / ".bin" / name), *arguments],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        print(f"{name}: did not end within {TIMEOUT_S:g} s: {exc.stdout!r}")
        return ""
    if ran.returncode:
        print(f"{name}: {ran.stdout}", flush=True)
        return ""
    return ran.stdout


def main() -> int:
    """Run all turns; returns the exit status."""
    if not fetch():
        return 77
    command = [sys.executable, str(ROOT / "ci" / "example_model.py"), "smollm2"]
    fetched = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if fetched.returncode:
        return fetched.returncode
    results = [*tool_turns(), *real_turns(fetched.stdout.strip())]
    return 0 if all(results) else 1


def tool_turns() -> Iterator[bool]:
    """Run the tool turns; yields whether each agent ran its tool and reported the output."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        tokenizer = Tokenizer.load(write_byte_tokenizer(home, chat_template=TEMPLATE))
        engine = FakeEngine(script, info=replace(FakeEngine().info, max_model_len=4_000_000))
        with (
            serving_app(create_app(engine, tokenizer)) as instance,
            running("mooncake_proxy", "--port", "0", "--backend-url", instance) as proxy,
        ):
            url = proxy.wait_for("http://").split()[-1]
            claude = configure(home, url, engine.config.model_name)
            said = {
                "claude": turn(
                    "claude", ["-p", "Make tea.", "--allowedTools", "Bash(echo:*)"], home, claude
                ),
                "codex": turn("codex", ["exec", "--skip-git-repo-check", "Make tea."], home, {}),
            }
    for name, text in said.items():
        is_good = "The tool said: " in text and SAID in text
        print(f"{name}: {'ran a tool and ended its turn' if is_good else text}", flush=True)
        yield is_good


def real_turns(model: str) -> Iterator[bool]:
    """Run the turns with a real model; yields whether each agent got an answer from what ``make up
    MODEL=smollm2`` serves."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        # Codex always sends tools, which this model's chat template ignores.
        up = ["up", "--model", model, "--port", "0", "--tool-call-parser", "hermes"]
        up += ["--served-model-name", "smollm2", "--log-dir", directory]
        (home / "generation_config.json").write_text('{"temperature": 0}')
        up += ["--generation-config", directory]
        with running("mooncake_engine.cli", *up) as deployment:
            url = deployment.wait_for("curl ").split("/v1/")[0].split()[-1]
            claude = configure(home, url, "smollm2", CODEX_SHORTLY)
            (home / "instructions.md").write_text(SHORTLY)
            asked = ["-p", QUESTION, "--system-prompt", SHORTLY, "--tools", ""]
            said = {
                "/v1/messages": turn("claude", asked, home, claude),
                "/v1/responses": turn(
                    "codex", ["exec", "--skip-git-repo-check", QUESTION], home, {}
                ),
            }
            metrics = httpx.get(f"{url}/metrics").text
    for path, text in said.items():
        answered = f'mooncake_proxy_requests_total{{endpoint="{path}",status="200"}} '
        print(f"{path}: {text.strip() or 'no answer'}", flush=True)
        yield bool(text.strip()) and answered in metrics


def configure(home: Path, url: str, model: str, codex: str = "") -> dict[str, str]:
    """Write Codex's configuration file; returns Claude Code's environment variables."""
    (home / ".codex").mkdir()
    config = codex.format(home=home) + CODEX_CONFIG.format(url=url).replace("agents-model", model)
    (home / ".codex" / "config.toml").write_text(config)
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
