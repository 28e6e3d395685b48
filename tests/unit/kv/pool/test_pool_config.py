"""``--kv-pool``: its settings, and the options derived from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_hal.options import from_arguments
from mooncake_hal.registry import Registry
from mooncake_kv.cli import StoreOptions, build_parser
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_kv.pool.pool_config import KVPoolConfig, read_kv_pool
from mooncake_kv.pool.pool_stores import PoolStores, own_store


def test_store_in_the_instance_and_others():
    text = "dram=4GiB,ssd=/ssd0/kv:2GiB,ssd=/ssd1:1G,port=7701,connect=10.0.0.2:7701,chunk=128"
    allowed = "source-allow=10.0.0.0/8,source-allow=stores.example"
    assert read_kv_pool(f"{text},load=always,{allowed}") == KVPoolConfig(
        dram_bytes=4 << 30,
        ssd=((Path("/ssd0/kv"), 2 << 30), (Path("/ssd1"), 1 << 30)),
        port=7701,
        connect=(("10.0.0.2", 7701),),
        source_allow=("10.0.0.0/8", "stores.example"),
        chunk_tokens=128,
        always_loads=True,
    )
    assert not read_kv_pool(text).always_loads


def test_store_in_instance_has_options_of_standalone_store():
    text = (
        "dram=4GiB,ssd=/ssd0/kv:2GiB,eviction=lfu,tenant-quota=team-a=1GiB,tenant-quota=b=2GiB,"
        "ssd-write-bytes-per-day=1TiB,ssd-min-free-bytes=1GiB"
    )
    config = own_store(read_kv_pool(text))
    assert (config.policy, config.quotas) == ("lfu", {"team-a": 1 << 30, "b": 2 << 30})
    assert config.ssd.write_bytes_per_day == 1 << 40
    assert [directory.min_free_bytes for directory in config.ssd.directories] == [1 << 30]
    options = ["store", "--dram", "4GiB", "--ssd", "/ssd0/kv:2GiB", "--eviction", "lfu"]
    options += ["--tenant-quota", "team-a=1GiB", "--tenant-quota", "b=2GiB"]
    options += ["--ssd-write-bytes-per-day", "1TiB", "--ssd-min-free-bytes", "1GiB"]
    args = build_parser().parse_args(options)
    command = from_arguments(StoreOptions, args).store_config()
    assert replace(config, quarantine_s=command.quarantine_s) == command


def test_ipv6_addresses_have_brackets():
    assert read_kv_pool("connect=[::1]:9,connect=host:10").connect == (("::1", 9), ("host", 10))


def test_mooncake_store_replaces_node_stores():
    found = read_kv_pool("mooncake-store=10.0.0.1:50051,dram=1G,staging=64M,protocol=rdma")
    assert found == KVPoolConfig(
        1 << 30, mooncake_store="10.0.0.1:50051", staging_bytes=64 << 20, protocol="rdma"
    )
    served = "metadata=http://10.0.0.1:8080/metadata,device=mlx5_0,device=mlx5_1"
    found = read_kv_pool(f"mooncake-store=10.0.0.1:50051,{served}")
    assert found.metadata == "http://10.0.0.1:8080/metadata"
    assert found.devices == ("mlx5_0", "mlx5_1")
    assert read_kv_pool("mooncake-store=[::1]:9").mooncake_store == "[::1]:9"


def test_missing_mooncake_client_or_master_is_reported():
    config = read_kv_pool("mooncake-store=127.0.0.1:1")
    with pytest.raises(
        KVConfigError, match=r"mooncake_master|pip install mooncake-transfer-engine"
    ):
        PoolStores(config, Registry.discover(), "here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "wanted dram=..., ssd=..., port=..., connect=..., mooncake-store=..., staging=..."),
        ("dram", "got 'dram'"),
        ("memory=4G", "got 'memory=4G'"),
        ("dram=lots", "dram: wanted bytes such as 512M or 4G, got 'lots'"),
        ("dram=1G,dram=2G", "dram is given twice"),
        ("dram=1G,ssd=/x", "wanted DIR:BYTES"),
        ("connect=host", "wanted HOST:PORT"),
        ("connect=host:0", "wanted a port, 1 to 65535, got 'host:0'"),
        ("dram=1G,port=70000", "wanted a port, 0 to 65535"),
        ("dram=1G,chunk=0", "must be a number, at least 1"),
        ("dram=1G,source-allow=10.0.0.0/99", "source-allow wants a host, an address, a network"),
        ("dram=1G,eviction=oldest", "eviction: wanted one of tail-first-lru, lru"),
        ("dram=1G,tenant-quota=5", "wanted TENANT=BYTES"),
        (
            "connect=a:1,eviction=lru",
            "eviction: apply to a node store in this instance",
        ),
        ("mooncake-store=a:1,dram=1G,tenant-quota=a=1G", "tenant-quota: apply to a node store"),
        ("dram=1G,ssd-min-free-bytes=0", "ssd-min-free-bytes: there is no SSD"),
        ("dram=1G,load=never", "load: wanted always or faster, got 'never'"),
        ("chunk=64", "names no store"),
        ("mooncake-store=host", "wanted HOST:PORT"),
        ("mooncake-store=etcd://10.0.0.1:2379", "wanted HOST:PORT of one master"),
        ("mooncake-store=a:1,connect=b:2", "ssd, port and connect apply to node stores only"),
        ("mooncake-store=a:1,protocol=hccs", "wanted tcp or rdma, got 'hccs'"),
        ("dram=1G,staging=1G", "staging, protocol, metadata and device apply to a Mooncake Store"),
        ("dram=1G,device=mlx5_0", "staging, protocol, metadata and device apply to a Mooncake"),
        ("connect=a:1,port=7", "ssd and port apply to a store in this instance"),
    ],
)
def test_invalid_settings_are_rejected(text, words):
    with pytest.raises(KVConfigError) as caught:
        read_kv_pool(text)
    assert words in str(caught.value)


def test_quarantine_exceeds_transfer_timeout():
    pool = read_kv_pool("dram=1G").with_network(KVTransferConfig(transfer_timeout_s=77))
    assert own_store(pool).quarantine_s == 87
