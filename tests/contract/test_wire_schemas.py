"""Each wire and file format beside its version: none changes by accident, or without a new version.

Processes of two releases refuse each other by these versions, and only by them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple, Union

import msgspec
import pytest

from mooncake_hal.session import authentication, frames
from mooncake_hal.session.processes import ProcessName
from mooncake_hal.transports.adapters import adapter_messages, nixl_agent
from mooncake_hal.transports.rdma import rdma_messages
from mooncake_hal.transports.session_endpoint import SessionAddress
from mooncake_hal.transports.shm import shm_peer, shm_transport
from mooncake_hal.transports.staged import staged_protocol
from mooncake_hal.transports.staging import PackedPieces
from mooncake_hal.transports.tcp import tcp_sockets
from mooncake_hal_ascend.hccs import hccs_staging, npu_location
from mooncake_hal_cuda.transports import ipc_protocol
from mooncake_kv import protocol
from mooncake_kv.store import ssd_records, store_messages


class Format(NamedTuple):
    """A format: its version, the hash of its schema, and its messages."""

    version: int
    schema: str
    messages: tuple[Any, ...]


FORMATS = {
    "the side channel (mooncake_kv.protocol.PROTOCOL_VERSION)": Format(
        protocol.PROTOCOL_VERSION, "5 c7f6bbb9f928", (protocol.AnyMessage,)
    ),
    "node stores (store_messages.STORE_PROTOCOL_VERSION)": Format(
        store_messages.STORE_PROTOCOL_VERSION,
        "4 2f1043777448",
        (store_messages.StoreRequest, store_messages.StoreReply, ProcessName),
    ),
    "SSD segments (ssd_records.RECORD_VERSION)": Format(
        ssd_records.RECORD_VERSION, "2 2973d56d7f22", (ssd_records.Header,)
    ),
    "tcp (tcp_sockets.VERSION)": Format(
        tcp_sockets.VERSION, "4 2ad39d5d84db", (tcp_sockets.TcpAddress, PackedPieces)
    ),
    "shm (shm_transport.VERSION)": Format(
        shm_transport.VERSION,
        "2 a636fae499c9",
        (shm_transport.ShmInfo, shm_transport.Probe, shm_peer.SharedRange),
    ),
    "staged (staged_protocol.VERSION)": Format(
        staged_protocol.VERSION,
        "6 4a08d01e4a6b",
        (
            staged_protocol.StagedEndpointInfo,
            staged_protocol.OpenStaging,
            staged_protocol.Gather,
            staged_protocol.Scatter,
            staged_protocol.StagingOpened,
        ),
    ),
    "rdma (rdma_messages.VERSION)": Format(
        rdma_messages.VERSION,
        "2 d7c16d5496b2",
        (
            rdma_messages.RdmaEndpointInfo,
            rdma_messages.OpenQueuePairs,
            rdma_messages.ReopenQueuePair,
            rdma_messages.QueuePairsOpened,
            rdma_messages.RegionKeys,
        ),
    ),
    "mooncake, nixl and hccs (adapter_messages.VERSION)": Format(
        adapter_messages.VERSION,
        "5 d89761e09170",
        (
            adapter_messages.AdapterInfo,
            adapter_messages.AgentDescription,
            nixl_agent.RegionInfo,
            npu_location.NpuLocation,
            hccs_staging.HccsRegionInfo,
            hccs_staging.Borrow,
            hccs_staging.Lent,
            hccs_staging.ScatterBuffer,
        ),
    ),
    "cuda_ipc (ipc_protocol.VERSION)": Format(
        ipc_protocol.VERSION,
        "3 70edbe41ae35",
        (ipc_protocol.IpcEndpointInfo, ipc_protocol.IpcRegionInfo, ipc_protocol.SendDescriptor),
    ),
}
SESSION = (
    authentication.Challenge,
    authentication.ClientHello,
    authentication.ServerWelcome,
    frames.Registered,
    frames.Revoked,
    frames.Ping,
    frames.SessionRequest,
    frames.SessionResponse,
    SessionAddress,
)


def shape(kind: msgspec.inspect.Type, around: tuple[type, ...] = ()) -> object:
    """What of a type is visible on the wire, as JSON; ``around`` are the types that it is in."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.Metadata):
        return shape(kind.type, around)
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        return shape_of_fields(kind, around)
    if isinstance(kind, inspect.UnionType):
        return sorted((shape(each, around) for each in kind.types), key=json.dumps)
    if isinstance(kind, inspect.EnumType):
        return sorted(str(member.value) for member in kind.cls)
    if isinstance(kind, inspect.DictType):
        return ["map", shape(kind.key_type, around), shape(kind.value_type, around)]
    if isinstance(kind, inspect.TupleType):
        return ["tuple", *(shape(each, around) for each in kind.item_types)]
    if isinstance(kind, inspect.CollectionType):
        return ["array", shape(kind.item_type, around)]
    return type(kind).__name__


def shape_of_fields(
    kind: msgspec.inspect.StructType | msgspec.inspect.DataclassType, around: tuple[type, ...]
) -> object:
    if kind.cls in around:
        return ["the type around it", around[::-1].index(kind.cls)]
    inner = (*around, kind.cls)
    fields = [[each.encode_name, each.required, shape(each.type, inner)] for each in kind.fields]
    tag, is_array = None, False
    if isinstance(kind, msgspec.inspect.StructType):
        tag, is_array = [kind.tag_field, kind.tag], kind.array_like
    # by position in arrays, by name in maps, where their order does not matter
    return [tag, is_array, fields if is_array else sorted(fields, key=json.dumps)]


def schema_hash(messages: tuple[Any, ...]) -> str:
    shapes = [shape(msgspec.inspect.type_info(each)) for each in messages]
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", list(FORMATS))
def test_format_changes_with_its_version(name: str) -> None:
    version, schema, messages = FORMATS[name]
    found = f"{version} {schema_hash(messages)}"
    assert found == schema, (
        f"{name}: version and schema are {found!r}, this test has {schema!r}. If a process of the "
        "last release would misread or refuse a new message, or a new one an old message (a field "
        "or tag renamed or removed, another type, another order in an array, a new field without a "
        "default), raise the version. A new field with a default in a map, which the old release "
        "ignores and the new one can do without, needs none. Then put what was found here."
    )


def test_session_changes_with_every_version() -> None:
    found = schema_hash(SESSION)
    assert found == "71c6dc323b33", (
        f"the session under all transports, the side channel and stores has the schema {found!r}. "
        "It has no version of its own: raise every version in FORMATS but that of SSD segments, "
        "then put what was found here."
    )


class Old(msgspec.Struct, tag="old"):
    number: int
    text: str = ""


class Swapped(msgspec.Struct, tag="old"):
    text: str = ""
    number: int = 0


class Positional(msgspec.Struct, tag="old", array_like=True):
    number: int
    other: int


class PositionalSwapped(msgspec.Struct, tag="old", array_like=True):
    other: int
    number: int


class Renamed(msgspec.Struct, tag="new"):
    number: int
    text: str = ""


class Retyped(msgspec.Struct, tag="old"):
    number: float
    text: str = ""


@pytest.mark.parametrize(
    ("one", "other"),
    [(Old, Swapped), (Old, Renamed), (Old, Retyped), (Positional, PositionalSwapped)],
)
def test_hash_sees_tags_fields_types_and_positions(one: Any, other: Any) -> None:
    assert schema_hash((one,)) != schema_hash((other,))
    assert schema_hash((Union[one, int],)) == schema_hash((Union[int, one],))  # noqa: UP007
