"""Imports that a server avoids, which were a quarter of its start time."""

from __future__ import annotations

import subprocess
import sys

from support.programs import TINY_LLAMA

# In the order in which `serve` imports them: text first, then the engine; then both are used.
PROGRAM = f"""
import sys
from pathlib import Path
from mooncake_engine.text.tokenizer import Tokenizer, block_torch_import, allow_torch_import

model = Path({str(TINY_LLAMA)!r})
block_torch_import()
tokenizer = Tokenizer.load(model)
assert sys.modules["torch"] is None
allow_torch_import()

from mooncake_engine.assembly import build_engine
from mooncake_engine.config import EngineConfig

core = build_engine(EngineConfig(model, num_kv_blocks=128, swap_space_bytes=0)).core
text = tokenizer.render_chat([{{"role": "user", "content": "hello"}}])
assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
core.close()
unused = ("torch._dynamo", "sympy", "triton", "transformers.core_model_loading")
print([name for name in unused if name in sys.modules])
"""


def test_server_imports_no_transformers_models_and_no_torch_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
