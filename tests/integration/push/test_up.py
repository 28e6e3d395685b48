"""``up`` with the push connector: the proxy's flow follows from the connector."""

from __future__ import annotations

from support.programs import TINY_LLAMA, running
from support.push import LAYERWISE


def test_up_with_the_push_connector_answers() -> None:
    options = ("--model", str(TINY_LLAMA), "--port", "0", "--num-kv-blocks", "256")
    with running("mooncake_engine.cli", "up", *options, "--kv-connector", LAYERWISE) as program:
        program.wait_for("Prefill reads the whole prompt at once and fills the KV cache.")
