"""The fingerprint depends on every tensor and setting of a checkpoint, not on file names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_kv.errors import KVConfigError
from mooncake_kv.model_fingerprint import (
    BYTES_PER_PAIR,
    GGUF_INDEX_NAME,
    INDEX_NAME,
    SAMPLE_BYTES,
    ModelFingerprint,
    longrope_settings,
    model_fingerprint,
    sample_offsets,
)

CONFIG = {"num_hidden_layers": 2, "rope_theta": 10000.0}
NAMES = ("embed", "layers.0.q_proj", "layers.0.v_proj", "layers.1.q_proj", "norm")
LARGE = 20 * SAMPLE_BYTES
ELEMENT = 2
Tensors = dict[str, bytes]


def some_tensors(num_bytes: int = LARGE) -> Tensors:
    return {name: bytes([index]) * num_bytes for index, name in enumerate(NAMES)}


def write_file(path: Path, tensors: Tensors, dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, data in tensors.items():
        offsets = [start, start + len(data)]
        header[name] = {"dtype": dtype, "shape": [len(data) // ELEMENT], "data_offsets": offsets}
        start += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


def write_model(
    directory: Path, tensors: Tensors, config: dict[str, Any] = CONFIG, dtype: str = "BF16"
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", tensors, dtype)
    return directory


def fingerprint(directory: Path, tensors: Tensors, **fields: Any) -> ModelFingerprint:
    return model_fingerprint(write_model(directory, tensors, **fields), "bfloat16")


def changed(data: bytes, offset: int) -> bytes:
    """Change one element at this position."""
    return data[:offset] + bytes([data[offset] ^ 1]) + data[offset + 1 :]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "offset", [0, LARGE // 2, LARGE - ELEMENT], ids=["first", "middle", "last"]
)
def test_one_changed_element_changes_fingerprint(name: str, offset: int, tmp_path: Path) -> None:
    tensors = some_tensors()
    first = fingerprint(tmp_path / "a", tensors)
    other = fingerprint(tmp_path / "b", {**tensors, name: changed(tensors[name], offset)})
    assert other.weights != first.weights
    assert other.settings == first.settings


@pytest.mark.parametrize("num_bytes", [ELEMENT, SAMPLE_BYTES, 3 * SAMPLE_BYTES])
def test_small_tensor_is_read_completely(num_bytes: int, tmp_path: Path) -> None:
    tensors = some_tensors(num_bytes)
    first = fingerprint(tmp_path / "a", tensors)
    for offset in {0, 1, num_bytes // 3, num_bytes - 1}:
        other = {**tensors, "norm": changed(tensors["norm"], offset)}
        assert fingerprint(tmp_path / "b", other) != first


@pytest.mark.parametrize(
    "num_bytes", [1, SAMPLE_BYTES + 1, LARGE, BYTES_PER_PAIR - 1, BYTES_PER_PAIR, 1 << 31]
)
def test_samples_span_a_tensor_from_its_first_byte_to_its_last(num_bytes: int) -> None:
    offsets = sample_offsets(num_bytes)
    assert offsets[0] == 0
    assert num_bytes - SAMPLE_BYTES <= offsets[-1] < num_bytes
    assert len(offsets) <= 3 + 2 * num_bytes / BYTES_PER_PAIR
    if len(offsets) > 2:
        middle = offsets[len(offsets) // 2]
        assert middle <= num_bytes // 2 < middle + SAMPLE_BYTES


def test_empty_tensor_has_a_fingerprint(tmp_path: Path) -> None:
    assert sample_offsets(0) == []
    fingerprint(tmp_path / "a", {"empty": b""})


def test_names_types_and_shapes_change_fingerprint(tmp_path: Path) -> None:
    tensors = some_tensors()
    first = fingerprint(tmp_path / "a", tensors)
    renamed = {name.replace("norm", "scale"): data for name, data in tensors.items()}
    for other in (
        fingerprint(tmp_path / "b", renamed),
        fingerprint(tmp_path / "c", tensors, dtype="F16"),
        fingerprint(tmp_path / "d", {**tensors, "norm": tensors["norm"] + b"\0\0"}),
    ):
        assert other.settings["tensors"] != first.settings["tensors"]
        assert other.weights != first.weights


def test_swapped_tensors_change_fingerprint(tmp_path: Path) -> None:
    tensors = some_tensors()
    swapped = {**tensors, "layers.0.q_proj": tensors["embed"], "embed": tensors["layers.0.q_proj"]}
    assert fingerprint(tmp_path / "a", tensors) != fingerprint(tmp_path / "b", swapped)


def test_distribution_over_files_does_not_change_fingerprint(tmp_path: Path) -> None:
    tensors = some_tensors()
    whole = fingerprint(tmp_path / "whole", tensors)
    spread = write_model(tmp_path / "spread", {})
    (spread / "model.safetensors").unlink()
    for number, (name, data) in enumerate(reversed(tensors.items())):
        write_file(spread / f"model-{number}.safetensors", {name: data})
    assert model_fingerprint(spread, "bfloat16") == whole


def test_file_outside_index_is_ignored(tmp_path: Path) -> None:
    tensors = some_tensors()
    directory = write_model(tmp_path / "model", tensors)
    first = model_fingerprint(directory, "bfloat16")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    write_file(directory / "consolidated.safetensors", {"tok_embeddings": b"ab"})
    assert model_fingerprint(directory, "bfloat16") == first


def test_without_an_index_files_beside_model_safetensors_are_ignored(
    tmp_path: Path,
) -> None:
    directory = write_model(tmp_path / "model", some_tensors())
    first = model_fingerprint(directory, "bfloat16")
    write_file(directory / "original.safetensors", {"tok_embeddings": b"ab"})
    assert model_fingerprint(directory, "bfloat16") == first


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {"rope_theta": 500000.0}),
    ("rope", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ("quantization", {"quantization_config": {"quant_method": "fp8"}}),
    ("config.json", {"rms_norm_eps": 1e-5}),
    ("config.json", {"num_hidden_layers": 3}),
]


@pytest.mark.parametrize(("name", "change"), SETTINGS, ids=str)
def test_differing_setting_is_named(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    first = fingerprint(tmp_path / "a", some_tensors())
    other = fingerprint(tmp_path / "b", some_tensors(), config={**CONFIG, **change})
    assert other.weights == first.weights
    assert {key for key in first.settings if first.settings[key] != other.settings[key]} == {name}


def test_dtype_changes_fingerprint(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", some_tensors())
    first, other = (model_fingerprint(directory, dtype) for dtype in ("bfloat16", "float16"))
    assert (first.settings["dtype"], other.settings["dtype"]) == ("bfloat16", "float16")
    assert first.weights == other.weights


def test_cosmetic_fields_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    named = {**CONFIG, "_name_or_path": "/somewhere", "transformers_version": "5.1.0"}
    first = fingerprint(tmp_path / "a", some_tensors())
    assert fingerprint(tmp_path / "b", some_tensors(), config=named) == first


def damage_short(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_header(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)


def damage_index(directory: Path) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {"embed": "gone.safetensors"}}))


def damage_config(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_short, "ends within norm"),
        (damage_header, "damaged or not safetensors"),
        (damage_index, r"gone\.safetensors"),
        (damage_config, "must hold a JSON object"),
    ],
)
def test_damaged_checkpoint_is_named(damage: Any, words: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", some_tensors())
    damage(directory)
    with pytest.raises(KVConfigError, match=words):
        model_fingerprint(directory, "bfloat16")


def test_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(KVConfigError, match="has no"):
        model_fingerprint(tmp_path, "bfloat16")


def test_fingerprint_reads_megabytes_of_large_model(tmp_path: Path) -> None:
    """A 70B model in bfloat16: 723 tensors of up to 2 GiB, 141 GB in all."""
    layer = [8192 * 8192, 8192 * 1024, 8192 * 1024, 8192 * 8192, *[8192 * 28672] * 3, 8192, 8192]
    sizes = [ELEMENT * count for count in (layer * 80 + [8192 * 128256] * 2 + [8192])]
    read = sum(len(sample_offsets(size)) * SAMPLE_BYTES for size in sizes)
    assert sum(sizes) > 140e9
    assert read < 64e6


def test_gguf_model_is_identified_by_the_tensors_of_its_index(tmp_path: Path) -> None:
    data = bytes(range(256)) * 64
    index = {
        name: {"file": "m.gguf", "kind": "Q4_1", "shape": [64, 64], "start": start, "stop": stop}
        for name, start, stop in (("a", 0, 8192), ("b", 8192, 16384))
    }

    def fingerprint_of(content: bytes) -> ModelFingerprint:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / GGUF_INDEX_NAME).write_text(json.dumps(index))
        (tmp_path / "m.gguf").write_bytes(content)
        return model_fingerprint(tmp_path, "float16")

    first = fingerprint_of(data)
    assert fingerprint_of(data) == first
    assert fingerprint_of(changed(data, 9000)).weights != first.weights
    with pytest.raises(KVConfigError, match="ends within b"):
        fingerprint_of(data[:9000])
    del index["b"]["stop"]
    with pytest.raises(KVConfigError, match=r"is damaged: KeyError\('stop'\)"):
        fingerprint_of(data)


@pytest.mark.parametrize(
    ("longest", "max_positions", "is_included"),
    [(4096, 131_072, True), (4097, 131_072, False), (4096, 4096, False)],
)
def test_short_longrope_factors_are_a_setting_if_the_model_has_long_ones(
    longest: int, max_positions: int, is_included: bool
) -> None:
    """Our engine and our connector in vLLM compute the same fingerprint."""
    assert bool(longrope_settings(longest, 4096, max_positions)) == is_included
