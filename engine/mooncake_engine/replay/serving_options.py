"""The options of ``bench serve``: those of ``vllm bench serve`` that concern text generation."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mooncake_engine.errors import ConfigError
from mooncake_engine.replay.serving_datasets import DATASETS, Dataset
from mooncake_engine.replay.serving_result import ServingTargets

CHAT_BACKENDS = ("openai-chat", "vllm-chat")
_BACKENDS = ("vllm", "openai", *CHAT_BACKENDS)
_SAMPLING = {
    **{"top_p": float, "top_k": int, "min_p": float, "temperature": float},
    **{"frequency_penalty": float, "presence_penalty": float, "repetition_penalty": float},
}
_WITHOUT_EFFECT = ("--disable-tqdm", "--trust-remote-code", "--no-stream")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    _add_endpoint_options(parser)
    _add_dataset_options(parser)
    _add_traffic_options(parser)
    _add_result_options(parser)


def _add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--backend",
        choices=_BACKENDS,
        default="openai",
        help="API to use: completions (vllm, openai) or chat (openai-chat, vllm-chat)",
    )
    add("--base-url", metavar="URL", help="URL of the endpoint (default: --host and --port)")
    add("--host", default="127.0.0.1", metavar="HOST", help="address of the endpoint")
    add("--port", type=int, default=8000, metavar="PORT", help="port of the endpoint")
    add("--endpoint", metavar="PATH", help="path of the endpoint (default: that of --backend)")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="headers of every request")
    add("--insecure", action="store_true", help="do not verify the endpoint's certificate")
    add(
        "--model",
        metavar="MODEL",
        help="model to request, whose tokenizer counts tokens (default: the endpoint's first)",
    )
    add("--served-model-name", metavar="NAME", help="model to request (default: --model)")
    add(
        "--tokenizer",
        metavar="MODEL",
        help="directory or ORG/NAME of the tokenizer for the prompts (default: --model)",
    )
    add("--tokenizer-mode", default="auto", metavar="MODE", help="no effect: uses tokenizer.json")
    for name, parse in _SAMPLING.items():
        add(
            f"--{name.replace('_', '-')}",
            type=parse,
            metavar="VALUE",
            help=f"{name} of every request (default: the endpoint's)",
        )
    add(
        "--ignore-eos",
        action="store_true",
        help="continue answers to their full length; implied by --dataset-name random",
    )
    add("--logprobs", type=int, metavar="N", help="log probabilities to request per token")
    add(
        "--extra-body", type=_json_object, metavar="JSON", help="additional fields of every request"
    )
    for flag in _WITHOUT_EFFECT:
        add(flag, action="store_true", help="no effect")


def _add_dataset_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=tuple(DATASETS), default="random", help="kind of prompts")
    add("--dataset-path", type=Path, metavar="FILE", help="file of sharegpt, sonnet or custom")
    add("--num-prompts", type=int, default=1000, metavar="N", help="number of requests")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts, lengths and times")
    add("--input-len", type=int, metavar="TOKENS", help="prompt length of random and sonnet")
    add("--output-len", type=int, metavar="TOKENS", help="answer length, for any dataset")
    add("--random-input-len", type=int, default=1024, metavar="TOKENS", help="prompt length")
    add("--random-output-len", type=int, default=128, metavar="TOKENS", help="answer length")
    add("--random-prefix-len", type=int, default=0, metavar="TOKENS", help="shared prefix length")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="range of random lengths around the given ones, as a share of them",
    )
    add("--sonnet-input-len", type=int, default=550, metavar="TOKENS", help="prompt length")
    add("--sonnet-output-len", type=int, default=150, metavar="TOKENS", help="answer length")
    add("--sonnet-prefix-len", type=int, default=200, metavar="TOKENS", help="shared prefix length")
    add(
        "--sharegpt-output-len",
        type=int,
        metavar="TOKENS",
        help="answer length (default: the dataset's)",
    )
    add(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="TOKENS",
        help="answer length; -1 uses each line's output_tokens",
    )
    add("--skip-chat-template", action="store_true", help="send prompts without a chat template")
    add("--disable-shuffle", action="store_true", help="keep the file's order")
    add("--no-oversample", action="store_true", help="do not reuse a file's entries")


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="PER_SECOND",
        help="requests per second, at random times; inf sends all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma distribution of intervals: 1 is Poisson, less is more bursty",
    )
    add("--max-concurrency", type=int, metavar="N", help="most requests in flight")
    add(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="how the rate grows from --ramp-up-start-rps to --ramp-up-end-rps",
    )
    for end in ("start", "end"):
        add(f"--ramp-up-{end}-rps", type=int, metavar="PER_SECOND", help=f"rate at the {end}")
    add("--num-warmups", type=int, default=0, metavar="N", help="warm-up requests before the run")
    add(
        "--ready-check-timeout-sec",
        type=int,
        default=0,
        metavar="SECONDS",
        help="how long to wait for the endpoint to answer; 0 does not wait",
    )
    add(
        "--request-id-prefix",
        default="bench-",
        metavar="TEXT",
        help="prefix of each request's X-Request-Id, followed by its number",
    )


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="METRICS",
        help="metrics to report, of ttft, tpot, itl, e2el",
    )
    add(
        "--metric-percentiles",
        default="99",
        metavar="PERCENTS",
        help="percentiles of these metrics, separated by commas",
    )
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits that a good request meets, of ttft, tpot, e2el",
    )
    add("--save-result", action="store_true", help="write the result as a JSON file")
    add("--save-detailed", action="store_true", help="include times and text of every request")
    add("--append-result", action="store_true", help="append the result to the file as a line")
    add(
        "--result-dir",
        type=Path,
        metavar="DIR",
        help="directory of the result file (default: the working directory)",
    )
    add(
        "--result-filename",
        metavar="NAME",
        help="name of the result file (default: label, rate, model and time)",
    )
    add("--label", metavar="NAME", help="label in the result (default: --backend)")
    add(
        "--metadata",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="additional entries of the result",
    )


def dataset_of(args: argparse.Namespace) -> Dataset:
    """The dataset that the arguments select."""
    num_input = {"random": args.random_input_len, "sonnet": args.sonnet_input_len}
    num_prefix = {"random": args.random_prefix_len, "sonnet": args.sonnet_prefix_len}
    num_output = {
        "random": args.random_output_len,
        "sonnet": args.sonnet_output_len,
        "sharegpt": args.sharegpt_output_len,
        "custom": args.custom_output_len,
    }
    name = args.dataset_name
    return Dataset(
        name,
        args.dataset_path,
        args.num_prompts,
        num_input.get(name, 0) if args.input_len is None else args.input_len,
        num_output[name] if args.output_len is None else args.output_len,
        num_prefix=num_prefix.get(name, 0),
        range_ratio=args.random_range_ratio,
        seed=args.seed,
        is_shuffled=not args.disable_shuffle,
        repeats=not args.no_oversample,
        is_chat=args.backend in CHAT_BACKENDS,
        has_template=not args.skip_chat_template,
    )


def targets_of(args: argparse.Namespace) -> ServingTargets:
    """The metrics, percentiles and goodput limits to report.

    Raises:
        ConfigError: a metric is unknown or a value invalid.
    """
    try:
        percentiles = tuple(float(value) for value in args.metric_percentiles.split(","))
        goodput = {name: float(limit) for name, limit in _pairs(args.goodput, ":").items()}
    except ValueError as exc:
        raise ConfigError(f"--metric-percentiles and --goodput take numbers: {exc}") from exc
    metrics = tuple(name.strip() for name in args.percentile_metrics.split(","))
    return ServingTargets(metrics, percentiles, goodput)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The additional fields of every request's body."""
    found = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.logprobs is not None:
        is_chat = args.backend in CHAT_BACKENDS
        found |= (
            {"logprobs": True, "top_logprobs": args.logprobs}
            if is_chat
            else {"logprobs": args.logprobs}
        )
    return found | (args.extra_body or {})


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """The headers of ``--header``.

    Raises:
        ConfigError: a header has no value.
    """
    return _pairs(args.header, "=")


def metadata_of(args: argparse.Namespace) -> dict[str, str]:
    """The entries of ``--metadata``.

    Raises:
        ConfigError: an entry has no value.
    """
    return _pairs(args.metadata, "=")


def _pairs(entries: list[str], separator: str) -> dict[str, str]:
    pairs = [entry.partition(separator) for entry in entries]
    for name, found, _ in pairs:
        if not found:
            raise ConfigError(f"{name!r} must be KEY{separator}VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, got {text!r}")
    return found
