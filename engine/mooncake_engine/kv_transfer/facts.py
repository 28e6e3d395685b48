"""What an instance says of itself in the handshake, and whether two of them fit together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mooncake_engine.errors import HandshakeRefused
from mooncake_hal.deployment import Hardware, PairFacts, check_pair
from mooncake_hal.errors import DeploymentRefused, PlanError
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.kv.plan import KVPlacement, elect_sources


class RankFacts(msgspec.Struct, frozen=True):
    """One rank.

    Args:
        shard, layout: what it holds, and where.
        endpoints: transport name to the address that a peer's endpoint connects to.
    """

    shard: KVShard
    layout: KVLayout
    endpoints: dict[str, bytes]

    @property
    def placement(self) -> KVPlacement:
        """As the planner takes it."""
        return KVPlacement(self.shard, self.layout)


class InstanceFacts(msgspec.Struct, frozen=True):
    """One instance, as it is: measured, not configured.

    Args:
        engine_id: name of this incarnation.
        model_fingerprint, tokenizer_fingerprint: equal for equal files.
        geometry: of the whole model's KV.
        block_size: tokens per block.
        hardware: what it runs on.
        ranks: all of its ranks: stage after stage, and within one by tensor-parallel rank.
        host: the kernel and network namespace that its side channel is in; empty if that is not
            known.
    """

    engine_id: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    geometry: KVGeometry
    block_size: int
    hardware: Hardware
    ranks: tuple[RankFacts, ...]
    host: str = ""

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return len({(rank.shard.layer_start, rank.shard.layer_stop) for rank in self.ranks})

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of a stage."""
        return len(self.ranks) // self.pp_size

    @property
    def pair_facts(self) -> PairFacts:
        """What the rules of deployments look at."""
        return PairFacts(self.hardware, self.tp_size, self.block_size, self.pp_size)


@dataclass(frozen=True, slots=True)
class _Check:
    what: str
    prefill: object
    decode: object


def check_fit(prefill: InstanceFacts, decode: InstanceFacts) -> None:
    """Whether KV of one instance can serve the other. Both sides run this on what they were told.

    Raises:
        HandshakeRefused: names the first fact that differs, with both values.
    """
    for facts in (prefill, decode):
        _check_ranks(facts)
    for check in (
        _Check("model", prefill.model_fingerprint, decode.model_fingerprint),
        _Check("tokenizer", prefill.tokenizer_fingerprint, decode.tokenizer_fingerprint),
        _Check("KV geometry", prefill.geometry, decode.geometry),
    ):
        if check.prefill != check.decode:
            raise HandshakeRefused(
                f"{check.what} differs: the prefill instance has {check.prefill}, "
                f"the decode instance {check.decode}; serve the same model with the same dtype"
            )
    try:
        check_pair(prefill.pair_facts, decode.pair_facts)
    except DeploymentRefused as exc:
        raise HandshakeRefused(str(exc)) from exc


def _check_ranks(facts: InstanceFacts) -> None:
    """What an instance says of its memory must make sense, because addresses come of it."""
    for index, rank in enumerate(facts.ranks):
        if not _is_sound(rank, facts):
            raise HandshakeRefused(
                f"rank {index} of instance {facts.engine_id} describes its KV memory in a way that "
                f"contradicts itself or the model: {rank.shard}, {rank.layout}; run the same "
                "release on both"
            )
    geometry = facts.geometry
    whole = KVShard(0, geometry.layers, 0, geometry.kv_heads)
    try:
        elect_sources(whole, [rank.shard for rank in facts.ranks], spread=0)
    except PlanError as exc:
        raise HandshakeRefused(
            f"the ranks of instance {facts.engine_id} don't hold the model's KV between them: "
            f"{exc}; run the same release on both"
        ) from exc


def _is_sound(rank: RankFacts, facts: InstanceFacts) -> bool:
    shard, layout, geometry = rank.shard, rank.layout, facts.geometry
    strides = (layout.block_strides, layout.head_strides, layout.token_strides)
    return (
        0 <= shard.layer_start < shard.layer_stop <= geometry.layers
        and 0 <= shard.head_start < shard.head_stop <= geometry.kv_heads
        and layout.block_size == facts.block_size >= 1
        and [len(bases) for bases in layout.bases] == [shard.layers] * geometry.planes
        and all(len(plane_strides) == geometry.planes for plane_strides in strides)
        and all(
            0 <= number < ADDRESS_LIMIT for axis in (*layout.bases, *strides) for number in axis
        )
    )


ADDRESS_LIMIT = 1 << 63
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 4096


def model_fingerprint(directory: Path) -> str:
    """A name for a checkpoint: its configuration, and the sizes and samples of its weights.

    Training changes practically every weight, so that a few pages of each file tell models apart
    without reading gigabytes.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for weights in sorted(directory.glob("*.safetensors")):
        size = weights.stat().st_size
        digest.update(f"{weights.name}:{size};".encode())
        with weights.open("rb") as file:
            for index in range(SAMPLES_PER_FILE):
                file.seek(size * index // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
