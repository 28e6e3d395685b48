"""Flags of ``vllm serve`` that are no options here: ignored with a warning, or rejected with the
option to use instead.

Flags with the same meaning are aliases of our options (``Option.aliases``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mooncake_engine.errors import ConfigError

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "--enable-prefix-caching": "prefix caching is on",
    "--enable-chunked-prefill": "long prompts run in chunks",
    "--no-enable-log-requests": "requests are not logged; see --access-log",
    "--disable-log-requests": "requests are not logged; see --access-log",
    "--enable-log-requests": "see --access-log",
    "--disable-log-stats": "see --log-stats-interval",
    "--disable-fastapi-docs": "there are no such pages",
    "--enable-request-id-headers": "responses always have X-Request-Id",
    "--exclude-tools-when-tool-choice-none": "tool_choice none always hides the tools",
    "--disable-sliding-window": "models with a sliding window are served up to its length",
    "--disable-cascade-attn": "kernels are the backend's own",
    "--disable-uvicorn-access-log": "requests are not logged; see --access-log",
    "--enable-auto-tool-choice": "tool calls are read where the chat template has them",
    "--language-model-only": "only text is served",
    "--disable-custom-all-reduce": "collectives are the backend's own",
    "--disable-hybrid-kv-cache-manager": "each model has one KV layout",
    "--trust-request-chat-template": "requests can't set templates",
    "--disable-frontend-multiprocessing": "see --core-process",
    "--enable-prompt-tokens-details": "usage always includes cached tokens",
    "--headless": "nodes other than the first have no API anyway",
    "--enable-server-load-tracking": "see /metrics",
}
"""Switches to ignore, and the reason."""
_WITHOUT_EFFECT_OF_VALUE = {
    "--limit-mm-per-prompt": "only text is served",
    "--mm-processor-cache-gb": "only text is served",
    "--max-logprobs": "up to 128 are supported",
    "--max-seq-len-to-capture": "graphs are captured by batch size",
    "--uvicorn-log-level": "see --log-level",
    "--max-log-len": "requests are not logged",
    "--tokenizer-mode": "the fast tokenizer is used",
    "--max-parallel-loading-workers": "ranks load in parallel",
    "--max-num-partial-prefills": "see --min-prefill-chunk",
    "--distributed-executor-backend": "see --executor",
    "--structured-outputs-config": "grammars are compiled by llguidance",
    "--guided-decoding-backend": "grammars are compiled by llguidance",
    "--response-role": "responses have the role assistant",
    "--chat-template-content-format": "text parts are concatenated",
    "--compilation-config": "see --enforce-eager",
    "-O": "see --enforce-eager",
    "--optimization-level": "see --enforce-eager",
    "--max-cudagraph-capture-size": "graphs are captured by batch size",
    "--attention-backend": "kernels are the backend's own",
    "--moe-backend": "kernels are the backend's own",
    "--prefix-caching-hash-algo": "blocks are identified by BLAKE2b",
    "--scheduling-policy": "requests run by priority, and by arrival where it is equal",
    "--stream-interval": "the tokens of a step are sent at once",
}
"""Flags with a value to ignore, and the reason."""
_INSTEAD = {
    "--kv-transfer-config": "--role prefill (kv_producer) or --role decode (kv_consumer), "
    "--kv-connector MooncakeConnector (pull) or MooncakeLayerwiseConnector (push), "
    "--transport, --kv-host; vLLM itself takes our connectors: docs/vllm.md",
    "--revision": "--model ORG/NAME@REVISION",
    "--tokenizer-revision": "--model ORG/NAME@REVISION",
    "--hf-overrides": "--model with a directory whose config.json has them",
    "--hf-config-path": "--model with a directory that contains both",
    "--tokenizer": "--model with a directory that contains both",
    "--hf-token": "the environment variable HF_TOKEN",
    "--download-dir": "the environment variable HF_HOME",
    "--load-format": "no option: safetensors and GGUF are recognised by their files",
    "--trust-remote-code": "a model of docs/models.md: a checkpoint's code is never run",
    "--api-key": "--api-key-file FILE, which does not show the key in process lists; with up, "
    "--proxy-args='--api-key-file FILE'",
    "--speculative-config": "--speculative-method, --num-speculative-tokens, --speculative-model",
    "--enable-expert-parallel": "--ep-size; vLLM's division is --dp-size times --tp-size",
    "--enable-eplb": "--eplb-step-interval 3000",
    "--eplb-config": "--eplb-step-interval (step_interval) and --redundant-experts "
    "(num_redundant_experts)",
    "--enable-lora": "a checkpoint with the adapter merged",
    "--lora-modules": "a checkpoint with the adapter merged",
    "--spec-method": "--speculative-method",
    "--spec-model": "--speculative-model",
    "--spec-tokens": "--num-speculative-tokens",
    "--kv-cache-memory-bytes": "--kv-cache-bytes",
    "--long-prefill-token-threshold": "--prefill-chunk-size",
    "--otlp-traces-endpoint": "--otlp-endpoint, OTLP over HTTP",
    "--default-chat-template-kwargs": "chat_template_kwargs in requests",
    "--enable-force-include-usage": "stream_options in requests",
    "--enable-sleep-mode": "no option: stop the instance to free its devices",
    "--cpu-offload-gb": "more ranks (--tp-size, --pp-size)",
    "--kv-offloading-size": "--kv-pool dram=4GiB",
    "--override-generation-config": "--generation-config DIR",
    "--task": "no option: only generation is served",
    "--runner": "no option: only generation is served",
    "--ssl-keyfile": "a TLS proxy in front: docs/deployment.md",
    "--ssl-certfile": "a TLS proxy in front: docs/deployment.md",
    "--root-path": "a path in the reverse proxy",
    "--allowed-origins": "a reverse proxy in front",
    "--middleware": "a reverse proxy in front",
    "--uds": "--host and --port",
    **dict.fromkeys(
        (
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-size-local",
            "--data-parallel-start-rank",
            "--data-parallel-rank",
            "--data-parallel-backend",
            "--data-parallel-hybrid-lb",
            "--data-parallel-external-lb",
        ),
        "--dp-size; over several hosts with --nnodes, --node-rank, --master-addr and --master-port",
    ),
}
"""Flags to reject, and what to use instead."""


def with_model_flag(argv: Sequence[str], commands: Sequence[str]) -> list[str]:
    """Returns a command line with ``--model`` before a model that directly follows the command, as
    in ``vllm serve MODEL``.

    Args:
        argv: the command and its arguments.
        commands: commands that accept this.
    """
    has_model = len(argv) > 1 and argv[0] in commands and not argv[1].startswith("-")
    return [argv[0], "--model", *argv[1:]] if has_model else list(argv)


def vllm_words(name: str, value: Any) -> list[str] | None:
    """Returns the words of a setting of vLLM's config file that ``without_vllm_flags`` accepts or
    rejects; None for a name that is not vLLM's."""
    flag = f"--{name.replace('_', '-')}"
    if flag in _INSTEAD and value is False:
        return []
    if flag in _INSTEAD or flag in _WITHOUT_EFFECT or flag in _WITHOUT_EFFECT_OF_VALUE:
        return [] if value is None else [f"{flag}={value}"]
    return None


def without_vllm_flags(unknown: Sequence[str]) -> list[str]:
    """Returns the unknown arguments without vLLM's flags.

    Raises:
        ConfigError: a flag would change what is served; the message says what to use instead.
    """
    left: list[str] = []
    words = iter(unknown)
    for word in words:
        flag, _, value = word.partition("=")
        if flag in _INSTEAD:
            raise ConfigError(f"{flag} is an option of vLLM; use instead: {_INSTEAD[flag]}")
        if flag in _WITHOUT_EFFECT:
            logger.warning("%s has no effect: %s", flag, _WITHOUT_EFFECT[flag])
        elif flag in _WITHOUT_EFFECT_OF_VALUE:
            logger.warning("%s has no effect: %s", flag, _WITHOUT_EFFECT_OF_VALUE[flag])
            if not value:
                next(words, None)
        else:
            left.append(word)
    return left
