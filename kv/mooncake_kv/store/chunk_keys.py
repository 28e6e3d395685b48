"""Chunk keys: a chain of hashes over everything that a chunk's KV depends on.

    root  = BLAKE2b(identity, tenant salt)
    key_i = BLAKE2b(key_{i-1}, tokens of chunk i, extra of chunk i)

Two prompts share a key exactly if model, weights, element type, quantisation, positions, adapter,
tenant and all tokens up to the chunk's end are the same. Keys are 128 bits of a cryptographic hash,
so tokens are never compared on a hit, and a tenant can't make two prompts collide. The root is not
random, so that every process of a deployment computes the same keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mooncake_hal.kv.geometry import KVGeometry
from mooncake_kv.errors import KVConfigError
from mooncake_kv.model_fingerprint import ModelFingerprint
from mooncake_kv.pool.pool_config import DEFAULT_CHUNK_TOKENS

KEY_BYTES = 16

KEY_VERSION = 1
"""Version of the keys and of the chunks' byte layout; chunks of another version are misses."""


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What KV depends on besides the tokens. Identities that differ in any field share no chunks.

    Args:
        model: fingerprint of configuration and weights.
        dtype: element type of the stored KV, such as ``"bfloat16"``.
        chunk_tokens: tokens per chunk.
        quantisation: quantisation of weights or KV, where KV values depend on it; empty for none.
        rope: scaling of positions where it differs from the model's configuration, and the order
            of the rotated elements where engines differ in it; empty for none.
        adapter: name and revision of a LoRA adapter; empty for none.
    """

    model: str
    dtype: str
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    quantisation: str = ""
    rope: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise KVConfigError(f"a chunk has 1 token or more, not {self.chunk_tokens}")
        if not self.model:
            raise KVConfigError("KV can't be stored for a model without a fingerprint")

    @classmethod
    def of_model(
        cls,
        model: ModelFingerprint,
        geometry: KVGeometry,
        chunk_tokens: int,
        rope_order: str = "",
    ) -> KVIdentity:
        """The identity of a model's KV. It is the same in every engine that runs the model, so that
        they share chunks. Opaque pages have an engine-specific format and are not shared.

        Args:
            model: fingerprint of the model.
            geometry: geometry of its KV.
            chunk_tokens: tokens per chunk.
            rope_order: order of the elements in the latents' rotated part, whose shape does not
                tell: "pairs", as in checkpoints, or "halves". Empty for KV of heads, which all
                engines keep as halves.
        """
        settings = json.dumps([model.settings, str(geometry)], sort_keys=True)
        return cls(
            f"{model.weights} {settings}",
            geometry.dtype,
            chunk_tokens,
            model.settings.get("quantization", ""),
            " ".join(filter(None, (model.settings.get("rope"), rope_order))),
        )

    def root(self, tenant_salt: str = "") -> bytes:
        """The key that a prompt's first chunk chains to, of KEY_BYTES bytes.

        Args:
            tenant_salt: ``cache_salt`` of the request; requests with different salts share no
                chunks.
        """
        fields = json.dumps([KEY_VERSION, asdict(self), tenant_salt], sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=KEY_BYTES, person=b"kv-root").digest()


def chunk_keys(
    identity: KVIdentity,
    tokens: Sequence[int],
    *,
    tenant_salt: str = "",
    extra: Sequence[bytes] = (),
) -> list[bytes]:
    """Keys of all full chunks of a prompt, in its order; a partial last chunk has none.

    Args:
        identity: identity of the KV.
        tokens: token ids of the prompt, or of prompt and answer.
        tenant_salt: ``cache_salt`` of the request.
        extra: what else each chunk depends on, by chunk, such as the hash of an image that it
            overlaps. Missing ones are empty.
    """
    return extend_keys(identity, identity.root(tenant_salt), tokens, extra=extra)


def extend_keys(
    identity: KVIdentity, parent: bytes, tokens: Sequence[int], *, extra: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the full chunks of ``tokens``, which follow the chunk ``parent``.

    Used for growing answers, to hash only the new tokens.
    """
    size = identity.chunk_tokens
    num_chunks = len(tokens) // size
    data = np.asarray(tokens[: num_chunks * size], dtype="<i8").tobytes()
    width, keys = size * 8, []
    for index in range(num_chunks):
        link = hashlib.blake2b(parent, digest_size=KEY_BYTES, person=b"kv-chunk")
        link.update(data[index * width : (index + 1) * width])
        if index < len(extra):
            link.update(extra[index])
        parent = link.digest()
        keys.append(parent)
    return keys


def num_loadable_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """How many chunks of a prompt may be loaded. Its last token must always be computed: if all of
    a prompt's tokens were loaded, there would be no logits to sample from.
    """
    return max(0, num_tokens - 1) // chunk_tokens


def completes_chunks(start: int, stop: int, chunk_tokens: int) -> bool:
    """Whether a step that computes tokens ``start`` to ``stop`` completes chunks that are saved
    layer by layer while it runs.

    A chunk that a single token completes is saved after the step instead: decode steps run as whole
    graphs, which make no calls between layers, and most of such a chunk was computed before.
    """
    return stop - start > 1 and stop // chunk_tokens > start // chunk_tokens
