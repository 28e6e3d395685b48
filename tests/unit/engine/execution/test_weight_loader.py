"""The weight loader: every rank gets exactly its part, and invalid checkpoints are reported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import random_model, write_checkpoint
from torch import Tensor

from mooncake_engine.checkpoints.tensor_files import INDEX_NAME
from mooncake_engine.core_messages import LoadProgress
from mooncake_engine.errors import CheckpointError
from mooncake_engine.execution.weight_loader import load_weights
from mooncake_engine.models.catalog import Model, build_model, read_model_config
from mooncake_engine.models.layers import ParallelContext, Span
from mooncake_hal.backend_parts import SingleRankCommunicator
from mooncake_hal.reference import ReferenceOps


class RankOf(SingleRankCommunicator):
    """A rank of a group that never communicates."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def build(
    directory: Path,
    rank: int = 0,
    tp_size: int = 1,
    layers: Span | None = None,
    ep_size: int = 1,
) -> Model:
    communicator = RankOf(rank, tp_size) if tp_size > 1 else None
    device, dtype = torch.device("cpu"), torch.float32
    parallel = ParallelContext(ReferenceOps(), device, dtype, communicator, layers, ep_size=ep_size)
    return build_model(read_model_config(directory), parallel, 64)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(random_model("qwen2"), tmp_path / "model", max_shard="60KB")


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
def test_parts_of_all_ranks_make_up_the_checkpoint(checkpoint: Path, tp_size: int) -> None:
    whole: dict[str, Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        whole |= load_file(path)
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    for rank in range(tp_size):
        model = build(checkpoint, rank, tp_size)
        slots = list(model.weight_shards())
        load_weights(model, checkpoint)
        for slot in slots:
            window = [
                slice(start, start + size)
                for start, size in zip(slot.offset, slot.target.shape, strict=True)
            ]
            rebuilt[slot.name][tuple(window)] = slot.target
    for name, tensor in whole.items():
        assert torch.equal(rebuilt[name], tensor), name


@pytest.mark.parametrize(
    ("family", "tp_size", "ep_size"), [("deepseek_v3", 4, 4), ("mixtral", 4, 2), ("mixtral", 4, 4)]
)
def test_rank_reads_only_its_own_experts(
    family: str, tp_size: int, ep_size: int, tmp_path: Path
) -> None:
    directory = write_checkpoint(random_model(family), tmp_path / "model")
    experts = {name for name in load_file(directory / "model.safetensors") if ".experts." in name}
    readers: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for rank in range(tp_size):
        model = build(directory, rank, tp_size, ep_size=ep_size)
        shards = [shard for shard in model.weight_shards() if ".experts." in shard.name]
        readers.update(shard.name for shard in shards)
        for shard in shards:
            elements[shard.name] += shard.target.numel()
            assert shard.target.shape == shard.full_shape or ep_size < tp_size
        assert load_weights(model, directory).fraction == 1.0
    assert readers == dict.fromkeys(experts, tp_size // ep_size)
    assert elements == {
        name: tensor.numel()
        for name, tensor in load_file(directory / "model.safetensors").items()
        if name in experts
    }


def test_expert_beyond_the_config_is_unexpected(tmp_path: Path) -> None:
    directory = write_checkpoint(random_model("mixtral"), tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.block_sparse_moe.experts.6.w1.weight"] = torch.ones(2)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"holds .*experts\.6\.w1"):
        load_weights(build(directory, 0, 2, ep_size=2), directory)


STAGES = (Span(0, 1), Span(1, 3))
"""Layer ranges of the stages of the small models, which have three layers."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_tensor_belongs_to_one_stage_except_a_tied_embedding(
    family: str, is_tied: bool, tmp_path: Path
) -> None:
    model = random_model(family, tie_word_embeddings=is_tied)
    directory = write_checkpoint(model, tmp_path / "model")
    stages = [build(directory, layers=span) for span in STAGES]
    names = [{slot.name for slot in stage.weight_shards()} for stage in stages]
    for stage in stages:
        assert load_weights(stage, directory).fraction == 1.0
    assert names[0] | names[1] == set(load_file(directory / "model.safetensors"))
    shared = {"model.embed_tokens.weight"} if is_tied else set()
    assert names[0] & names[1] == shared


@pytest.mark.parametrize(
    ("rank", "tp_size", "layers"), [(0, 1, None), (1, 2, None), (0, 1, STAGES[1])]
)
def test_separate_tied_head_must_equal_the_embedding(
    rank: int, tp_size: int, layers: Span | None, tmp_path: Path
) -> None:
    directory = write_checkpoint(random_model("qwen3", tie_word_embeddings=True), tmp_path / "m")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    model = build(directory, rank, tp_size, layers)
    assert load_weights(model, directory).fraction == 1.0
    tensors["lm_head.weight"][-1, 0] += 1.0
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding.* to false"):
        load_weights(build(directory, rank, tp_size, layers), directory)


def test_without_an_index_only_model_safetensors_is_read(
    tmp_path: Path,
) -> None:
    directory = write_checkpoint(random_model("qwen2"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    # sorted behind it: Mistral's own form, and another precision
    save_file({"tok_embeddings.weight": torch.ones(2)}, directory / "original.safetensors")
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(others, directory / "model_fp16.safetensors")
    model = build(directory)
    slots = list(model.weight_shards())
    load_weights(model, directory)
    (norm,) = (slot.target for slot in slots if slot.name == "model.norm.weight")
    assert torch.equal(norm, tensors["model.norm.weight"])


def test_files_that_hold_the_same_tensor_need_an_index(checkpoint: Path) -> None:
    (checkpoint / INDEX_NAME).unlink()
    assert load_weights(build(checkpoint), checkpoint).fraction == 1.0
    first, *_ = sorted(checkpoint.glob("*.safetensors"))
    names = sorted(load_file(first))
    save_file({names[0]: torch.ones(2)}, checkpoint / "of-another-training.safetensors")
    message = f"{first.name} and of-another.* both hold {names[0]}"
    with pytest.raises(CheckpointError, match=message):
        load_weights(build(checkpoint), checkpoint)


def test_stage_opens_only_the_files_it_needs(checkpoint: Path) -> None:
    last = json.loads((checkpoint / INDEX_NAME).read_text())["weight_map"]["lm_head.weight"]
    (checkpoint / last).write_bytes(b"damaged")
    assert load_weights(build(checkpoint, layers=STAGES[0]), checkpoint).fraction == 1.0
    with pytest.raises(CheckpointError, match="damaged or not safetensors"):
        load_weights(build(checkpoint, layers=STAGES[1]), checkpoint)


def test_unexpected_tensor_is_reported_by_the_stage_of_its_layer(tmp_path: Path) -> None:
    directory = write_checkpoint(random_model("llama"), tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.surprise"] = torch.ones(2)
    save_file(tensors, path)
    assert load_weights(build(directory, layers=STAGES[0]), directory).fraction == 1.0
    with pytest.raises(CheckpointError, match=r"holds .*model\.layers\.2\.surprise"):
        load_weights(build(directory, layers=STAGES[1]), directory)


def test_progress_reaches_all_bytes_of_the_rank(checkpoint: Path) -> None:
    seen: list[LoadProgress] = []
    final = load_weights(build(checkpoint), checkpoint, seen.append)
    assert seen[-1] == final
    assert final.fraction == 1.0
    assert [p.loaded_bytes for p in seen] == sorted(p.loaded_bytes for p in seen)
    assert final.total_bytes == sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")) - (
        sum(header_bytes(p) for p in checkpoint.glob("*.safetensors"))
    )


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_missing_shard_makes_the_checkpoint_incomplete(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"incomplete checkpoint.*{shard.name}"):
        load_weights(build(checkpoint), checkpoint)


def test_missing_and_unexpected_tensors_are_both_named(tmp_path: Path) -> None:
    directory = write_checkpoint(random_model("llama"), tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.surprise"] = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lacks model\.norm.* and holds .*model\.surprise"):
        load_weights(build(directory), directory)


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = write_checkpoint(random_model("llama"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] = 160
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"\[144, 64\], config.json asks for \[160, 64\]"):
        load_weights(build(directory), directory)


def test_integer_weights_are_rejected(tmp_path: Path) -> None:
    directory = write_checkpoint(random_model("llama"), tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"is torch\.int8; only unquantised weights and fp8"):
        load_weights(build(directory), directory)


def test_other_formats_and_damaged_files_are_rejected(checkpoint: Path) -> None:
    model = build(checkpoint)
    (checkpoint / INDEX_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        load_weights(model, checkpoint)
    (checkpoint / INDEX_NAME).unlink()
    shards = sorted(checkpoint.glob("*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:50])
    with pytest.raises(CheckpointError, match="damaged or not safetensors"):
        load_weights(model, checkpoint)
    for path in shards:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        load_weights(model, checkpoint)


def test_tied_head_in_the_file_is_ignored(tmp_path: Path) -> None:
    model = random_model("llama", tie_word_embeddings=True)
    directory = write_checkpoint(model, tmp_path / "model")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path)
    assert load_weights(build(directory), directory).fraction == 1.0
