"""Names for the content of full blocks: a chain of hashes over the tokens up to each block's end.

Equal in every process and on every machine, so that prefill, decode and proxy agree; after the
chained block hashes of vLLM's v1 engine, with BLAKE2b cut to 16 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT = blake2b(b"mooncake-hal prefix chain v1", digest_size=DIGEST_BYTES).digest()


def extend_chain(chain: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Append the digests of the blocks that ``token_ids`` fill beyond those in ``chain``."""
    parent = chain[-1] if chain else ROOT
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
        chain.append(parent)
