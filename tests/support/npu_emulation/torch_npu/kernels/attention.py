"""Fused attention, version 1 and 2, over paged caches: float32 inside, rounded once.

The limits are those of the ops' documentation in torch-npu 2.13. Where vllm-ascend uses more than
the documentation allows in production (TND over paged caches, float16, head sizes other than 128),
its practice counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.kernels.registry import kernel, require

MASK = 2048
MOST_SEQUENCES = 4096
LATENT, ROPE, MLA_TOKENS = 512, 64, 16
Lengths = Sequence[int] | None


@dataclass
class Call:
    """One call of either version.

    Args:
        query, key, value: in ``layout``.
        query_rope, key_rope: second part of queries and keys, for latent attention.
        mask: the compressed causal one, or None.
        query_lens, kv_lens: as given.
        block_table: [sequences, blocks].
        heads, kv_heads, block_size, sparse_mode: the op's arguments.
        scale: of the scores.
        layout: of queries and result.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    mask: Tensor | None
    query_lens: Lengths
    kv_lens: Lengths
    block_table: Tensor | None
    heads: int
    kv_heads: int
    block_size: int
    sparse_mode: int
    scale: float
    layout: str

    def run(self) -> tuple[Tensor, Tensor]:
        self._require_dtypes()
        self._require_paging()
        queries = self._queries()
        longest = max((len(each) for each in queries), default=0)
        self._require_mask(longest)
        if self.query_rope is not None:
            self._require_latent(longest)
        else:
            self._require_grouped()
        outputs = [self._attend(row, query) for row, query in enumerate(queries)]
        return self._joined(outputs), torch.zeros(1)

    # ------------------------------------------------------------ limits

    def _require_dtypes(self) -> None:
        tensors = [self.query, self.key, self.value, self.query_rope, self.key_rope]
        given = [each for each in tensors if each is not None]
        require(all(each.is_contiguous() for each in given), "inputs must be contiguous")
        dtypes = {each.dtype for each in given}
        one = dtypes in ({torch.bfloat16}, {torch.float16})
        require(one, f"all of one type, bfloat16 or float16, not {sorted(map(str, dtypes))}")

    def _require_paging(self) -> None:
        table = self.block_table
        require(table is not None, "the emulation attends to paged caches: block_table is needed")
        require(table.dtype == torch.int32 and table.is_contiguous(), "block_table: int32, dense")
        require(self.block_size % 16 == 0 and 16 <= self.block_size <= 512, "block_size is 16..512")
        require(self.kv_lens is not None and len(self.kv_lens) == len(table), "a length per row")
        require(len(table) <= MOST_SEQUENCES, f"at most {MOST_SEQUENCES} sequences")
        require(all(type(each) is int for each in self.kv_lens), "lengths are ints on the host")
        fits = all(0 < each <= table.shape[1] * self.block_size for each in self.kv_lens)
        require(fits, f"lengths {self.kv_lens} of a table of {table.shape[1]} blocks")

    def _require_mask(self, longest: int) -> None:
        if self.sparse_mode == 3:
            mask = self.mask
            require(mask is not None and mask.shape == (MASK, MASK), "sparse_mode 3: 2048 x 2048")
            require(mask.dtype in (torch.bool, torch.int8, torch.uint8), "mask: bool, int8, uint8")
            edges = (mask[0, 1:].sum(), mask[:, -1].sum(), mask[-1].sum(), mask.diagonal().sum())
            found = [int(each) for each in edges]
            require(found == [MASK - 1, MASK - 1, 0, 0], "the mask is 1 above the diagonal")
            return
        require(self.sparse_mode == 0 and self.mask is None, "sparse_mode 0 without mask, or 3")
        require(longest <= 1, "several tokens per sequence need the causal mask, sparse_mode 3")

    def _require_grouped(self) -> None:
        dim = self.query.shape[-1]
        require(dim % 16 == 0 and dim <= 256, f"heads are up to 256 wide, by sixteens, not {dim}")
        require(self.heads % self.kv_heads == 0, f"{self.heads} heads share {self.kv_heads}")
        require(self.heads // self.kv_heads <= 64, "at most 64 heads share one")

    def _require_latent(self, longest: int) -> None:
        require(self.key_rope is not None and self.kv_heads == 1, "latent attention: one KV head")
        widths = self.query.shape[-1], self.query_rope.shape[-1]
        require(widths == (LATENT, ROPE), f"latent and rope are 512 and 64 wide, not {widths}")
        require(self.heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{self.heads} heads: a power of two")
        require(longest <= MLA_TOKENS, f"at most {MLA_TOKENS} tokens per sequence, not {longest}")
        require(self.block_size in (16, 128), "block_size is 16 or 128")
        require(
            (longest > 1) == (self.sparse_mode == 3), "sparse_mode 3 for several tokens, else 0"
        )
        is_nz = self.key.dim() == 5
        require(not is_nz or self.layout in ("BSND_NBSD", "TND", "TND_NTD"), "NZ: BSND_NBSD or TND")
        require(not is_nz or self.block_size == 128, "NZ: block_size 128")

    # ------------------------------------------------------------ layouts

    def _queries(self) -> list[Tensor]:
        """Each sequence's queries: [tokens, heads, dim], with the rope part last."""
        query = self.query
        if self.query_rope is not None:
            query = torch.cat((query, self.query_rope), -1)
        form = self.layout.partition("_")[0]
        if form == "TND":
            starts = list(self.query_lens or ())
            require(len(starts) == len(self.block_table), "TND: a running sum of query lengths")
            require(starts == sorted(starts) and starts[-1] == len(query), "sums end at T")
            return list(torch.tensor_split(query, starts[:-1]))
        if form == "BSND":
            return list(query)
        require(form == "BNSD", f"Layout {self.layout} is not supported!")
        return [each.transpose(0, 1) for each in query]

    def _joined(self, outputs: list[Tensor]) -> Tensor:
        if self.layout == "TND":
            return torch.cat(outputs)
        if self.layout == "TND_NTD":
            return torch.cat(outputs).transpose(0, 1).contiguous()
        stacked = torch.stack(outputs)  # [B, S, N, D]
        if self.layout == "BSND":
            return stacked
        if self.layout == "BNSD":
            return stacked.transpose(1, 2).contiguous()
        require(
            self.layout in ("BNSD_NBSD", "BSND_NBSD"), f"Layout {self.layout} is not supported!"
        )
        return stacked.permute(2, 0, 1, 3).contiguous()

    def _rows(self, cache: Tensor, row: int) -> Tensor:
        """A sequence's keys or values: [tokens, kv heads, dim]."""
        length = self.kv_lens[row]
        blocks = self.block_table[row, : -(-length // self.block_size)].long()
        require(bool(((blocks >= 0) & (blocks < len(cache))).all()), "block ids lie in the cache")
        taken = cache[blocks]
        if taken.dim() == 3:  # [blocks, tokens, heads * dim]
            rows = taken.unflatten(-1, (self.kv_heads, -1))
        elif taken.dim() == 4:  # [blocks, heads, tokens, dim]
            rows = taken.transpose(1, 2)
        else:  # NZ: [blocks, heads, dim / 16, tokens, 16]
            rows = taken.permute(0, 3, 1, 2, 4).flatten(-2)
        require(rows.shape[1] == self.block_size, f"block_size {self.block_size}: {cache.shape}")
        return rows.flatten(0, 1)[:length].float()

    def _attend(self, row: int, query: Tensor) -> Tensor:
        key, value = self._rows(self.key, row), self._rows(self.value, row)
        if self.key_rope is not None:
            key = torch.cat((key, self._rows(self.key_rope, row)), -1)
        new, length = len(query), len(key)
        require(new <= length, f"{new} queries of {length} tokens")
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        attended = functional.scaled_dot_product_attention(
            query.float().transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=seen,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).to(self.query.dtype)


_UNLIMITED = {"pre_tokens": 2147483647, "next_tokens": 2147483647}
_V1 = ("actual_seq_lengths", "actual_seq_lengths_kv", "num_heads", "scale")
_V2 = ("actual_seq_qlen", "actual_seq_kvlen", "num_query_heads", "softmax_scale")


def _call(
    inputs: tuple[Tensor, Tensor, Tensor], arguments: dict[str, Any], names: Sequence[str]
) -> Call:
    """A call of one version; rejects all other arguments.

    Args:
        inputs: query, key and value.
        arguments: the keyword arguments.
        names: that version's names of query lengths, KV lengths, heads, and scale.
    """
    query_lens, kv_lens, num_heads, scale = names
    taken = dict(arguments)
    heads = taken.pop(num_heads, 1)
    call = Call(
        *inputs,
        query_rope=taken.pop("query_rope", None),
        key_rope=taken.pop("key_rope", None),
        mask=taken.pop("atten_mask", None),
        query_lens=taken.pop(query_lens, None),
        kv_lens=taken.pop(kv_lens, None),
        block_table=taken.pop("block_table", None),
        heads=heads,
        kv_heads=taken.pop("num_key_value_heads", 0) or heads,
        block_size=taken.pop("block_size", 0),
        sparse_mode=taken.pop("sparse_mode", 0),
        scale=taken.pop(scale, 1.0),
        layout=taken.pop("input_layout", "BSH"),
    )
    given = {name: value for name, value in taken.items() if value != _UNLIMITED.get(name)}
    unknown = {name: value for name, value in given.items() if value is not None and value != 0}
    require(not unknown, f"the emulation takes no {sorted(unknown)}")
    return call


@kernel("npu_fused_infer_attention_score")
def attention_v1(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _call((query, key, value), kwargs, _V1).run()


@kernel("npu_fused_infer_attention_score_v2")
def attention_v2(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return _call((query, key, value), kwargs, _V2).run()
