"""``kv_connector_extra_config``: the engine's options, parsed by the same parser."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_hal.port_range import PortRange
from mooncake_kv.errors import KVConfigError
from mooncake_vllm.vllm_settings import (
    of_data_parallel_rank,
    read_pool_settings,
    read_settings,
    wanted_layout,
)


def test_defaults_are_those_of_the_engine() -> None:
    config = read_settings({}, "MooncakeConnector")
    assert (config.connector, config.host, config.port) == ("MooncakeConnector", "127.0.0.1", 0)
    assert (config.lease_s, config.transports, config.secret) == (30.0, (), "")


def test_every_option_has_a_key(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush, little baby\n")
    config = read_settings(
        {
            "host": "0.0.0.0",
            "advertise_host": "127.0.0.1",
            "port_range": "14000-14099",
            "transport": ["shm", "tcp"],
            "secret_file": str(secret),
            "lease_seconds": 5,
            "transfer_timeout_seconds": 7.5,
            "layout": "BHLNC",
        },
        "MooncakeConnector",
    )
    assert (config.host, config.advertise_host) == ("0.0.0.0", "127.0.0.1")
    assert config.port_range == PortRange(14000, 14099)
    assert (config.transports, config.secret) == (("shm", "tcp"), "hush, little baby")
    assert (config.lease_s, config.transfer_timeout_s) == (5.0, 7.5)


def test_network_may_be_declared_closed() -> None:
    extra = {"host": "0.0.0.0", "advertise_host": "127.0.0.1", "allow_no_secret": True}
    assert read_settings(extra, "MooncakeConnector").allow_no_secret


def test_data_parallel_ranks_use_consecutive_ports() -> None:
    assert read_settings({"port": 14000}, "MooncakeConnector", 3).port == 14003
    assert read_settings({}, "MooncakeConnector", 3).port == 0


def test_store_of_data_parallel_rank_has_its_own_port_and_directories(
    tmp_path: Path,
) -> None:
    text = f"dram=1GiB,port=7701,ssd={tmp_path}:1GiB"
    pool = read_pool_settings({"pool": text}, "MooncakeConnector")
    ranks = [of_data_parallel_rank(pool, rank) for rank in range(3)]
    assert [each.port for each in ranks] == [7701, 7702, 7703]
    folders = [path for each in ranks for path, _ in each.ssd]
    assert folders == [tmp_path, tmp_path / "dp1", tmp_path / "dp2"]
    assert all(folder.is_dir() for folder in folders)
    assert of_data_parallel_rank(pool, 2) == ranks[2], "it is restarted"
    for port, wanted in (("port=0,", 0), ("", None)):
        pool = read_pool_settings({"pool": f"{port}dram=1GiB"}, "MooncakeConnector")
        assert of_data_parallel_rank(pool, 1).port == wanted


def test_directories_of_unmounted_drive_are_not_created(tmp_path: Path) -> None:
    text = f"dram=1GiB,ssd={tmp_path}/none:1GiB"
    pool = read_pool_settings({"pool": text}, "MooncakeConnector")
    with pytest.raises(KVConfigError, match=r"rank 1 can't have .*/none/dp1"):
        of_data_parallel_rank(pool, 1)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lease_second": 5}, "has lease_second, which the connector does not know; it knows"),
        ({"lease_seconds": "soon"}, "argument --lease-seconds: wanted a number, got 'soon'"),
        ({"port_range": "9-1"}, "wanted a range of ports"),
        ({"secret_file": "/nowhere"}, "can't read --kv-secret-file"),
        ({"host": "no.such.host.invalid"}, "has no address"),
        ({"secret": "hush"}, "has secret, which"),
        ({"host": "0.0.0.0", "advertise_host": "127.0.0.1"}, "without a secret"),
    ],
)
def test_invalid_settings_are_named(extra: dict[str, object], words: str) -> None:
    with pytest.raises(KVConfigError) as refused:
        read_settings(extra, "MooncakeConnector")
    assert words in str(refused.value)


def test_layout_must_be_one_of_vllm() -> None:
    assert wanted_layout({}) is None
    assert wanted_layout({"layout": "LBHNC"}) == "LBHNC"
    with pytest.raises(KVConfigError, match="layout 'HND' is not known"):
        wanted_layout({"layout": "HND"})
