"""The metadata that instances exchange in the handshake, and the check of whether two of them can
exchange KV."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from mooncake_hal.deployment import (
    Hardware,
    InstanceInfo,
    check_compatibility,
)
from mooncake_hal.errors import DeploymentRefused, PlanError
from mooncake_hal.kv.geometry import KVGeometry, KVShard
from mooncake_hal.kv.layout import KVLayout
from mooncake_hal.kv.transfer_plan import KVShardSpec, elect_sources
from mooncake_hal.specs import TransportConstraints
from mooncake_kv.errors import HandshakeRefused
from mooncake_kv.numerics import ROPE_ORDER, Numerics, differences


class RankMetadata(msgspec.Struct, frozen=True):
    """Metadata of one rank.

    Args:
        shard, layout: the part of the model's KV that it holds, and its addresses.
        endpoints: the addresses that a peer's endpoints connect to, by transport.
    """

    shard: KVShard
    layout: KVLayout
    endpoints: dict[str, bytes]

    @property
    def shard_spec(self) -> KVShardSpec:
        """The shard and its layout, in the form that the transfer planner takes."""
        return KVShardSpec(self.shard, self.layout)


class InstanceMetadata(msgspec.Struct, frozen=True):
    """Metadata of one instance, as found at run time rather than as configured.

    Args:
        engine_id: name of this epoch.
        model_fingerprint: hash of the checkpoint's weights; equal for equal files.
        tokenizer_fingerprint: hash of the tokenizer; empty if the instance is given token ids.
        model_settings: what else the KV of equal tokens depends on, by name: see
            ``ModelFingerprint``.
        geometry: geometry of the whole model's KV.
        block_size: tokens per block.
        hardware: backend and device generation.
        ranks: all of its ranks: stage after stage, and by tensor-parallel rank within a stage.
        host: identity of the kernel and network namespace of its side channel; empty if unknown.
        transports: transports that are open on all ranks, with the constraints of each.
        numerics: what the numbers of its KV mean, and how they are rounded.
        converts_rope_order: whether it converts the rope rows of received latents into its own
            order.
    """

    engine_id: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    geometry: KVGeometry
    block_size: int
    hardware: Hardware
    ranks: tuple[RankMetadata, ...] = ()
    host: str = ""
    model_settings: dict[str, str] = {}
    transports: dict[str, TransportConstraints] = {}
    numerics: Numerics = Numerics()
    converts_rope_order: bool = False

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return len({(rank.shard.layer_start, rank.shard.layer_stop) for rank in self.ranks})

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of a stage."""
        return len(self.ranks) // self.pp_size

    @property
    def must_match(self) -> dict[str, str]:
        """The properties that ``check_compatible`` requires to be equal, for proxies that choose
        pairs of instances in advance."""
        properties = {f"the model's {name}": value for name, value in self.model_settings.items()}
        meaning = self.numerics.meaning.items()
        properties |= {
            f"KV's {name}": value for name, value in meaning if not self.can_convert(name)
        }
        properties |= {"model": self.model_fingerprint, "KV geometry": str(self.geometry)}
        if self.geometry.groups:
            properties["KV-cache groups"] = str(self.geometry.groups)
        if self.tokenizer_fingerprint:
            properties["tokenizer"] = self.tokenizer_fingerprint
        return properties

    def can_convert(self, name: str) -> bool:
        """Whether this instance can decode from KV that differs in that property of
        ``numerics``."""
        return name == ROPE_ORDER and self.converts_rope_order

    @property
    def compatibility_info(self) -> InstanceInfo:
        """The properties that the deployment rules check."""
        return InstanceInfo(
            self.hardware, self.tp_size, self.block_size, self.pp_size, self.transports
        )

    def reachable_by(self, transports: tuple[str, ...]) -> tuple[RankMetadata, ...]:
        """The ranks, with the endpoints of these transports only."""
        return tuple(
            msgspec.structs.replace(
                rank,
                endpoints={name: at for name, at in rank.endpoints.items() if name in transports},
            )
            for rank in self.ranks
        )


@dataclass(frozen=True, slots=True)
class _Check:
    what: str
    prefill: object
    decode: object
    remedy: str = "serve the same model with the same dtype"


_SAME_NUMBERS = (
    "one would read other numbers than the other wrote: give both the same --kv-cache-dtype, and "
    "run engines that store this model's KV in the same way"
)
_SAME_PACKING = (
    "packed blocks can only be exchanged between instances with the same packing and block size: "
    "run the same attention on the same kind of CPU, or engines whose KV is linear"
)

CompatibilityCheck = Callable[[InstanceMetadata, InstanceMetadata], "tuple[str, ...]"]
"""``check_decode_peer`` or ``check_prefill_peer``. Takes our metadata and the peer's; returns the
transports that may be used between the two."""


def check_compatible(prefill: InstanceMetadata, decode: InstanceMetadata) -> tuple[str, ...]:
    """Check that two instances can exchange KV. Both sides run this on the other's metadata.

    Returns:
        Names of the transports whose constraints the pair meets.

    Raises:
        HandshakeRefused: they can't; names the first property that differs, with both values.
    """
    for instance in (prefill, decode):
        _check_ranks(instance)
    for check in _checks(prefill, decode):
        if check.prefill != check.decode:
            raise HandshakeRefused(
                f"{check.what} differs: the prefill instance has {check.prefill}, "
                f"the decode instance {check.decode}; {check.remedy}"
            )
    try:
        return check_compatibility(prefill.compatibility_info, decode.compatibility_info)
    except DeploymentRefused as exc:
        raise HandshakeRefused(str(exc)) from exc


def _checks(prefill: InstanceMetadata, decode: InstanceMetadata) -> Iterator[_Check]:
    """The properties that must be equal, those that are easiest to understand first."""
    for name in sorted(prefill.model_settings.keys() | decode.model_settings.keys()):
        ours, theirs = prefill.model_settings.get(name), decode.model_settings.get(name)
        yield _Check(f"the model's {name}", ours, theirs)
    yield _Check(
        "model",
        prefill.model_fingerprint,
        decode.model_fingerprint,
        "serve the same weights: one with an adapter merged into it is another model",
    )
    if prefill.tokenizer_fingerprint and decode.tokenizer_fingerprint:
        # If one of the two is given token ids, each request's prompt_digest is checked instead.
        yield _Check("tokenizer", prefill.tokenizer_fingerprint, decode.tokenizer_fingerprint)
    yield _Check("the dtype of KV", prefill.geometry.dtype, decode.geometry.dtype, _SAME_NUMBERS)
    yield _Check(
        "the format of KV blocks", prefill.geometry.format, decode.geometry.format, _SAME_PACKING
    )
    yield _Check(
        "how layers share block tables",
        prefill.geometry.groups,
        decode.geometry.groups,
        "give vLLM the same --disable-hybrid-kv-cache-manager on both",
    )
    yield _Check("KV geometry", prefill.geometry, decode.geometry)
    if any(group.window for group in prefill.geometry.groups):
        yield _Check(
            "block size",
            prefill.block_size,
            decode.block_size,
            "blocks that have left a sliding window are dropped whole: use one --block-size",
        )
    meant = differences(prefill.numerics.meaning, decode.numerics.meaning)
    for name, (ours, theirs) in meant.items():
        if not decode.can_convert(name):
            yield _Check(f"KV's {name}", ours, theirs, _SAME_NUMBERS)


def check_decode_peer(own: InstanceMetadata, peer: InstanceMetadata) -> tuple[str, ...]:
    """``check_compatible`` for an instance that prefills for that peer."""
    return check_compatible(prefill=own, decode=peer)


def check_prefill_peer(own: InstanceMetadata, peer: InstanceMetadata) -> tuple[str, ...]:
    """``check_compatible`` for an instance that continues what that peer prefilled."""
    return check_compatible(prefill=peer, decode=own)


def _check_ranks(instance: InstanceMetadata) -> None:
    """Validate an instance's description of its memory: transfer addresses are computed from
    it."""
    for index, rank in enumerate(instance.ranks):
        if not _is_sound(rank, instance):
            raise HandshakeRefused(
                f"rank {index} of instance {instance.engine_id} describes its KV memory in a way "
                f"that contradicts itself or the model: {rank.shard}, {rank.layout}; run the same "
                "release on both"
            )
    geometry = instance.geometry
    whole = KVShard(0, geometry.layers, 0, geometry.kv_heads)
    try:
        elect_sources(whole, [rank.shard for rank in instance.ranks], spread=0)
    except PlanError as exc:
        raise HandshakeRefused(
            f"the ranks of instance {instance.engine_id} together don't hold the model's KV: "
            f"{exc}; run the same release on both"
        ) from exc


def _is_sound(rank: RankMetadata, instance: InstanceMetadata) -> bool:
    shard, layout, geometry = rank.shard, rank.layout, instance.geometry
    strides = (layout.block_strides, layout.head_strides, layout.token_strides)
    return (
        0 <= shard.layer_start < shard.layer_stop <= geometry.layers
        and 0 <= shard.head_start < shard.head_stop <= geometry.kv_heads
        and layout.block_size == instance.block_size >= geometry.unit >= 1
        and layout.block_size % geometry.unit == 0
        and [len(bases) for bases in layout.bases] == [shard.layers] * geometry.planes
        and all(len(plane_strides) == geometry.planes for plane_strides in strides)
        and all(
            0 <= number < ADDRESS_LIMIT for axis in (*layout.bases, *strides) for number in axis
        )
    )


ADDRESS_LIMIT = 1 << 63

logger = logging.getLogger(__name__)

MAX_INCOMPATIBLE_PEERS = 256


class IncompatiblePeers:
    """Epochs whose handshake was refused, by either side. An instance's metadata never change, so
    such a pair stays incompatible for as long as both run. Written on the loop's thread, read on
    any.

    Attributes:
        engine_ids: the most recent ones, MAX_INCOMPATIBLE_PEERS at most.
        num_peers: number of all such epochs so far.
    """

    def __init__(self) -> None:
        self.engine_ids: tuple[str, ...] = ()
        self.num_peers = 0

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self.engine_ids

    def note(self, engine_id: str, reason: str) -> None:
        """Record a peer, and log it once."""
        if engine_id in self.engine_ids:
            return
        self.engine_ids = (*self.engine_ids, engine_id)[-MAX_INCOMPATIBLE_PEERS:]
        self.num_peers += 1
        logger.error(
            "instance %s and this one can't exchange KV for as long as both run: %s. Each request "
            "that is sent to both is prefilled twice: restart one of the two with settings that "
            "match the other, or remove one from the proxy's pools",
            engine_id,
            reason,
        )

    def level(self, engine_id: str) -> int:
        """The level at which to log that a request's KV could not be transferred: INFO for an
        incompatible peer, which was logged already."""
        return logging.INFO if engine_id in self.engine_ids else logging.WARNING
