"""GGUF: every tensor of every supported family equals the checkpoint's; damage is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from support.checkpoints import random_model, write_checkpoint
from support.gguf_files import Kind, write_gguf

from mooncake_engine.checkpoints.gguf_config import GGUFModel
from mooncake_engine.checkpoints.gguf_directory import gguf_directory
from mooncake_engine.checkpoints.gguf_header import parts_of, read_header
from mooncake_engine.checkpoints.gguf_tensors import GGUFTensors
from mooncake_engine.checkpoints.gguf_tokenizer import GGUFTokenizer, merges_of
from mooncake_engine.checkpoints.tensor_files import locate_tensors
from mooncake_engine.errors import CheckpointError
from mooncake_engine.models.catalog import read_model_config
from mooncake_engine.text.tokenizer import Tokenizer

TINY = Path("examples/tiny-llama")
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("mixtral", {}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {"moe_intermediate_size": 96, "norm_topk_prob": True}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(tmp_path: Path, family: str, overrides: dict[str, Any]) -> Path:
    model = random_model(family, **{"intermediate_size": 160, **overrides})
    return write_checkpoint(model, tmp_path / "checkpoint")


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_1])
def test_every_tensor_equals_that_of_the_checkpoint(
    family: str, overrides: dict[str, Any], kind: Kind, tmp_path: Path, cache: Path
) -> None:
    original = checkpoint(tmp_path, family, overrides)
    # The directory of a GGUF file needs a tokenizer; one beside the file is used.
    path = write_gguf(original, tmp_path / "model.gguf", kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    directory = gguf_directory(path)
    tensors = load_file(original / "model.safetensors")
    assert set(locate_tensors(directory)) == set(tensors)
    file = GGUFTensors(directory / "model.gguf")
    for name, tensor in tensors.items():
        wanted = tensor.numpy()
        if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            wanted = dequantize(quantize(wanted, kind), kind)
        whole = tuple(slice(0, size) for size in tensor.shape)
        assert file.shape(name) == tuple(tensor.shape), name
        assert np.array_equal(file.read(name, whole, torch.float32).numpy(), wanted), name
        part = tuple(slice(size // 3, size - size // 4) for size in tensor.shape)
        assert np.array_equal(file.read(name, part, torch.float32).numpy(), wanted[part]), name


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_config_equals_that_of_the_checkpoint(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    original = checkpoint(tmp_path, family, overrides)
    path = write_gguf(original, tmp_path / "model.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for directory in (tmp_path, original):
            (directory / name).write_bytes((TINY / name).read_bytes())
    found, wanted = read_model_config(gguf_directory(path)), read_model_config(original)
    for name in found.__dataclass_fields__:
        if name not in ("dtype", "rms_norm_eps"):
            assert getattr(found, name) == getattr(wanted, name), name
    assert found.rms_norm_eps == pytest.approx(wanted.rms_norm_eps, rel=1e-6)


def test_tokenizer_in_the_file_equals_the_original(tmp_path: Path) -> None:
    original = tmp_path / "tiny"
    original.mkdir()
    for file in TINY.iterdir():
        (original / file.name).write_bytes(file.read_bytes())
    made = Tokenizer.load(gguf_directory(write_gguf(original, tmp_path / "tiny.gguf", Kind.F32)))
    wanted = Tokenizer.load(TINY)
    for text in ("A language model", "größe 你好 <|im_start|>user\n1234  x\n\n", "<|eos|>"):
        assert made.encode(text) == wanted.encode(text)
        assert made.decode(made.encode(text)) == wanted.decode(wanted.encode(text))
    conversation = [{"role": "user", "content": "hi"}]
    assert made.render_chat(conversation) == wanted.render_chat(conversation)
    assert made.special_ids == wanted.special_ids


def test_llama_3_1_scaling_is_derived_from_its_factors(tmp_path: Path) -> None:
    from mooncake_engine.models.rope import Llama3Scaling, RopeConfig, inverse_frequencies

    original = checkpoint(tmp_path, "llama", {})
    path = tmp_path / "model.gguf"
    plain = RopeConfig(10000.0, 16)
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    factors = inverse_frequencies(plain) / inverse_frequencies(RopeConfig(10000.0, 16, scaling))
    import support.gguf_files as files

    tensors = files.gguf_tensors

    def with_factors(*args: Any) -> dict[str, Any]:
        return {**tensors(*args), "rope_freqs.weight": factors.numpy()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "gguf_tensors", with_factors)
        write_gguf(original, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    found = read_model_config(gguf_directory(path)).rope.scaling
    assert found == scaling


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
SCALINGS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, None),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ({"rope.scaling.type": "linear"}, None),
    ({"rope.scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
    ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    (
        {
            **YARN,
            "rope.scaling.original_context_length": 32768,
            "rope.scaling.yarn_attn_factor": 0.875,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
            "attn_factor": 0.875,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    (
        {**YARN, "rope.scaling.attn_factor": 0.875},
        {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.875},
    ),
]


@pytest.mark.parametrize(("metadata", "scaling"), SCALINGS)
def test_rope_scaling_equals_that_of_llama_cpp(
    metadata: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    """DeepSeek-Coder's older files have ``rope.scale_linear`` only."""
    header = read_header(write_gguf(checkpoint(tmp_path, "llama", {}), tmp_path / "model.gguf"))
    header.metadata.update({f"llama.{key}": value for key, value in metadata.items()})
    config = GGUFModel(tmp_path / "model.gguf", header).config()
    assert config.get("rope_scaling") == scaling


def test_pre_tokenizers_split_like_the_originals(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "1", "2", "Ġ", "ĠĠ", "12", "/", "/a"],
        "tokenizer.ggml.merges": ["Ġ Ġ", "1 2", "/ a"],
    }

    def tokens(pre: str, text: str) -> list[str]:
        named = {**metadata, "tokenizer.ggml.pre": pre}
        found: list[str] = GGUFTokenizer(tmp_path, named).backend().encode(text).tokens
        return found

    assert tokens("gpt-2", "a12") == ["a", "12"]
    assert tokens("smollm", "a12") == ["a", "1", "2"]
    assert tokens("smollm", "a  1") == ["a", "ĠĠ", "1"]
    assert tokens("qwen2", "a12") == ["a", "1", "2"]
    assert tokens("deepseek-r1-qwen", "a12") == ["a", "1", "2"]
    for pre in ("llama-bpe", "smaug-bpe", "dbrx"):
        assert tokens(pre, "a12") == ["a", "12"]
    assert tokens("tekken", "a12") == ["a", "1", "2"]
    assert tokens("tekken", "a/a") == ["a", "/a"]
    with pytest.raises(CheckpointError, match=r"pre 'acme' is not supported: put tokenizer\.json"):
        tokens("acme", "a")


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "smaug-bpe", "dbrx", "qwen2"])
def test_some_pre_tokenizers_take_words_whole_and_add_bos(pre: str, tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
        "tokenizer.ggml.token_type": [1, 0, 1, 3],  # 0: undefined
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.pre": pre,
    }
    backend = GGUFTokenizer(tmp_path, metadata).backend()
    does = pre in ("llama-bpe", "tekken")
    assert backend.encode("ab").tokens == (["<s>", "ab"] if does else ["a", "b"])


def test_outputs_end_at_tokens_that_end_them_in_llama_cpp_too(tmp_path: Path) -> None:
    header = read_header(write_gguf(checkpoint(tmp_path, "llama", {}), tmp_path / "model.gguf"))
    texts = {"a": 1, "<|eot_id|>": 3, "<|im_end|>": 4, "<|endoftext|>": 1, "<|eos|>": 3}
    header.metadata["tokenizer.ggml.tokens"] = [*texts]
    header.metadata["tokenizer.ggml.token_type"] = [*texts.values()]
    header.metadata["tokenizer.ggml.eos_token_id"] = 4
    model = GGUFModel(tmp_path / "model.gguf", header)
    assert model.eos_token_ids() == model.config()["eos_token_id"] == [1, 2, 4]
    del header.metadata["tokenizer.ggml.token_type"]
    assert model.eos_token_ids() == [4]


def test_sentencepiece_vocabulary_merges_by_scores(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "▁", "a", "b", "▁a", "ab", "▁ab"]
    scores = [0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    ids = {token: i for i, token in enumerate(tokens)}
    assert list(merges_of(ids, scores)) == [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁a", "b")]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    backend = GGUFTokenizer(tmp_path, metadata).backend()
    assert backend.encode("ab a").tokens == ["<s>", "▁ab", "▁a"]
    assert backend.decode([7, 5]) == "ab a"


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    original = checkpoint(tmp_path, "llama", {})
    path = write_gguf(original, tmp_path / "model.gguf")
    whole = path.read_bytes()
    for data, message in (
        (whole[:100], "100 bytes"),
        (whole[:-4096], "ends at byte"),
        (b"GGUX" + whole[4:], "does not start with GGUF"),
        (whole[:4] + b"\x09" + whole[5:], "version 9"),
        (whole[:16] + b"\xff" * 8 + whole[24:], "damaged or not a GGUF"),
        (b"", "damaged or not a GGUF"),
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=message):
            read_header(path)


def test_missing_part_makes_the_checkpoint_incomplete(tmp_path: Path) -> None:
    for i in (1, 3):
        (tmp_path / f"m-0000{i}-of-00003.gguf").touch()
    with pytest.raises(CheckpointError, match="incomplete checkpoint: m-00002-of-00003"):
        parts_of(tmp_path / "m-00001-of-00003.gguf")


def test_unsupported_files_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match="architecture 'mamba' is not supported in GGUF files; supp"
    ):
        gguf_directory(path)


def test_changed_file_gets_another_directory(tmp_path: Path, cache: Path) -> None:
    original = checkpoint(tmp_path, "llama", {})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    path = write_gguf(original, tmp_path / "model.gguf")
    first = gguf_directory(path)
    assert gguf_directory(path) == first
    write_gguf(original, path, Kind.Q4_1)
    second = gguf_directory(path)
    assert second != first
    assert json.loads((second / "config.json").read_text())["num_hidden_layers"] == 3
    assert {entry.name for entry in (cache / "mooncake-gguf").iterdir()} == {
        first.name,
        second.name,
    }
