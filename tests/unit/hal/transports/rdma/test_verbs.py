"""Our description of libibverbs' public ABI, and libraries that do not match it."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_hal.errors import TransportUnavailable
from mooncake_hal.native import find_compiler
from mooncake_hal.transports.rdma import verbs
from mooncake_hal.transports.rdma.work_requests import (
    RDMA_READ,
    RDMA_WRITE,
    SCATTER_GATHER,
    SEND_INLINE,
    SEND_SIGNALED,
    WORK_REQUEST,
)

HEADER = Path("/usr/include/infiniband/verbs.h")

OURS = {  # structs that we allocate, described in full
    "ibv_wc": verbs.IbvWc,
    "ibv_qp_cap": verbs.IbvQpCap,
    "ibv_qp_init_attr": verbs.IbvQpInitAttr,
    "ibv_global_route": verbs.IbvGlobalRoute,
    "ibv_ah_attr": verbs.IbvAhAttr,
    "ibv_qp_attr": verbs.IbvQpAttr,
}
THEIRS = {  # structs that the library allocates, described up to the last field that we read
    "ibv_context": verbs.IbvContext,
    "ibv_pd": verbs.IbvPd,
    "ibv_mr": verbs.IbvMr,
    "ibv_comp_channel": verbs.IbvCompChannel,
    "ibv_cq": verbs.IbvCq,
    "ibv_qp": verbs.IbvQp,
}
CONSTANTS = {
    "IBV_ACCESS_LOCAL_WRITE": verbs.ACCESS_LOCAL_WRITE,
    "IBV_ACCESS_REMOTE_WRITE": verbs.ACCESS_REMOTE_WRITE,
    "IBV_ACCESS_REMOTE_READ": verbs.ACCESS_REMOTE_READ,
    "IBV_QPT_RC": verbs.QPT_RC,
    "IBV_QPS_INIT": verbs.QPS_INIT,
    "IBV_QPS_RTR": verbs.QPS_RTR,
    "IBV_QPS_RTS": verbs.QPS_RTS,
    "IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS": verbs.TO_INIT,
    "IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN"
    " | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER": verbs.TO_RTR,
    "IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN"
    " | IBV_QP_MAX_QP_RD_ATOMIC": verbs.TO_RTS,
    "IBV_SEND_SIGNALED": SEND_SIGNALED,
    "IBV_SEND_INLINE": SEND_INLINE,
    "IBV_WR_RDMA_WRITE": RDMA_WRITE,
    "IBV_WR_RDMA_READ": RDMA_READ,
}


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Clear the cache of ``load``, which keeps the first library: these tests load others."""
    verbs.load.cache_clear()
    yield
    verbs.load.cache_clear()


def test_structs_that_we_allocate_have_their_full_size() -> None:
    sizes = {name: ctypes.sizeof(struct) for name, struct in OURS.items()}
    assert sizes == {
        "ibv_wc": 48,
        "ibv_qp_cap": 20,
        "ibv_qp_init_attr": 64,
        "ibv_global_route": 24,
        "ibv_ah_attr": 32,
        "ibv_qp_attr": 144,
    }


def test_fields_that_we_read_have_the_offsets_of_the_abi() -> None:
    operations = verbs.IbvContextOps
    assert operations.poll_cq.offset == 11 * 8
    assert operations.req_notify_cq.offset == 12 * 8
    assert operations.post_send.offset == 25 * 8
    assert (verbs.IbvContext.ops.offset, verbs.IbvContext.cmd_fd.offset) == (8, 264)
    assert (verbs.IbvMr.lkey.offset, verbs.IbvMr.rkey.offset) == (36, 40)
    assert (verbs.IbvQp.qp_num.offset, verbs.IbvQp.qp_type.offset) == (52, 60)
    assert (verbs.IbvCompChannel.fd.offset, verbs.IbvCq.channel.offset) == (8, 8)


@pytest.mark.skipif(
    not HEADER.exists() or find_compiler() is None, reason="needs libibverbs-dev and a C compiler"
)
def test_layout_agrees_with_the_hosts_header(tmp_path: Path) -> None:
    claims = [f"{text} == {value}" for text, value in CONSTANTS.items()]
    for name, struct in {**OURS, **THEIRS}.items():
        claims += [
            f"offsetof(struct {name}, {field}) == {getattr(struct, field).offset}"
            for field, *_ in struct._fields_
        ]
    claims += [f"sizeof(struct {name}) == {ctypes.sizeof(struct)}" for name, struct in OURS.items()]
    claims += [
        f"offsetof(struct ibv_context, ops.{name}) == "
        f"{verbs.IbvContext.ops.offset + getattr(verbs.IbvContextOps, name).offset}"
        for name in ("poll_cq", "req_notify_cq", "post_send")
    ]
    for name, dtype in (("ibv_send_wr", WORK_REQUEST), ("ibv_sge", SCATTER_GATHER)):
        claims.append(f"sizeof(struct {name}) == {dtype.itemsize}")
        for field, (_, offset, *_) in (dtype.fields or {}).items():
            inner = f"wr.rdma.{field}" if field in ("remote_addr", "rkey") else field
            claims.append(f"offsetof(struct {name}, {inner}) == {offset}")
    lines = [
        f"_Static_assert(({claim.rsplit(' == ', 1)[0]}) == {claim.rsplit(' == ', 1)[1]}, "
        f'"{claim}");'
        for claim in claims
    ]
    source = tmp_path / "layout.c"
    source.write_text("\n".join([f'#include "{HEADER}"', "#include <stddef.h>", *lines]))
    compiler = find_compiler()
    assert compiler is not None
    done = subprocess.run(
        [compiler, "-fsyntax-only", str(source)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_struct_with_another_layout_is_named() -> None:
    verbs.check_layout("ibv_pd", {"context": (7, 7)})
    with pytest.raises(TransportUnavailable, match=r"struct ibv_pd differently.*'context': \(9, 7"):
        verbs.check_layout("ibv_pd", {"context": (9, 7), "handle": (1, 1)})


@pytest.mark.usefixtures("fresh_library")
def test_missing_library_is_named() -> None:
    with pytest.raises(TransportUnavailable, match=r"libnoverbs\.so.*install rdma-core's"):
        verbs.load("libnoverbs.so.1")


@pytest.mark.usefixtures("fresh_library")
def test_library_without_the_symbols_is_named() -> None:
    with pytest.raises(TransportUnavailable, match=r"libc\.so\.6 has no \['ibv_get_device_list'"):
        verbs.load("libc.so.6")
