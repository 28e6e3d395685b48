"""Keeps the blocks of sliding windows until their chunks are saved to the pool.

vLLM frees a block once the window has passed it. For most of a prompt's blocks that is one step
after the step that computes them, before they can be copied to a store. So a chunk's blocks get
another reference while vLLM still has its own: when the step that computes the chunk's last token
is scheduled. A chunk that is no longer than a window has all of its blocks then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from mooncake_hal.kv.geometry import KVGroup
from mooncake_kv.errors import KVConfigError
from mooncake_vllm.vllm_interface import NULL_BLOCK, BlockPool

HELD_SHARE = 4
"""At most one in this many of vLLM's blocks is held; each held one is a block less for requests."""


class WindowBlocks:
    """References on blocks of vLLM's pool. All methods must be called on vLLM's thread, except
    ``release``.

    Args:
        groups: the KV-cache groups, in the order of a request's block tables.
        chunk_tokens: tokens per chunk.
        block_tokens: tokens per vLLM block.

    Raises:
        KVConfigError: a chunk is longer than a window, counted in whole blocks.
    """

    def __init__(self, groups: Sequence[KVGroup], chunk_tokens: int, block_tokens: int) -> None:
        windows = {index: group.window for index, group in enumerate(groups) if group.window}
        window = min(windows.values(), default=chunk_tokens)
        longest = -(-window // block_tokens) * block_tokens
        if chunk_tokens > longest:
            raise KVConfigError(
                f"pool: chunks of {chunk_tokens} tokens are longer than the sliding window of some "
                f"layers, which is {window} tokens: use chunk=N with a multiple of {block_tokens} "
                f"up to {longest}, the same for all instances that share KV"
            )
        self._groups = tuple(windows)
        self._chunk_tokens, self._block_tokens = chunk_tokens, block_tokens
        self._pool: BlockPool | None = None
        self._num_held = 0
        self._released: deque[Sequence[int]] = deque()
        self.num_dropped = 0
        """Chunks that were not saved since some of their blocks could not be held."""

    @property
    def exist(self) -> bool:
        """Whether any group has a window. If not, there is nothing to hold."""
        return bool(self._groups)

    @property
    def num_held(self) -> int:
        """References on blocks, those that are released but not yet vLLM's again included."""
        return self._num_held

    def bind(self, pool: BlockPool) -> None:
        """Use vLLM's block pool; nothing is held before."""
        self._pool = pool

    def hold(self, tables: Sequence[Sequence[int]], chunk: int) -> list[int] | None:
        """Hold a chunk's blocks in all groups with windows. The step that computes its last token
        has just been scheduled, or the request begins with its KV.

        Args:
            tables: the request's block tables.
            chunk: position of the chunk.

        Returns:
            The held blocks, for ``release``. None, counted: some of them are freed already, as
            those of a prefix that was in vLLM's cache, or too many blocks are held.
        """
        places = self._places(chunk)
        blocks = [block for group in self._groups for block in tables[group][places]]
        pool = self._pool
        if (
            pool is None
            or NULL_BLOCK in blocks
            or (self._num_held + len(blocks)) * HELD_SHARE > pool.num_gpu_blocks
        ):
            self.num_dropped += 1
            return None
        pool.touch([pool.blocks[block] for block in blocks])
        self._num_held += len(blocks)
        return blocks

    def restore(self, tables: Sequence[list[int]], chunk: int, blocks: Sequence[int]) -> None:
        """Put a chunk's held blocks into block tables that vLLM has removed them from.

        Args:
            tables: the request's block tables.
            chunk: position of the chunk.
            blocks: its held blocks, as returned by ``hold``.
        """
        places = self._places(chunk)
        count = places.stop - places.start
        for number, group in enumerate(self._groups):
            tables[group][places] = blocks[number * count : (number + 1) * count]

    def _places(self, chunk: int) -> slice:
        """The places of a chunk's blocks in a block table."""
        first = chunk * self._chunk_tokens // self._block_tokens
        return slice(first, -(-(chunk + 1) * self._chunk_tokens // self._block_tokens))

    def release(self, blocks: Sequence[int]) -> None:
        """Release held blocks; vLLM gets them back with ``free_released``. Any thread."""
        if blocks:
            self._released.append(blocks)

    def free_released(self) -> None:
        """Give the released blocks back to vLLM."""
        while self._released:
            blocks = self._released.popleft()
            assert self._pool is not None, "blocks were held without a pool"
            self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
            self._num_held -= len(blocks)
