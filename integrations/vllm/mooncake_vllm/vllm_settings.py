"""Reads ``kv_connector_extra_config``, whose keys are options of ``mooncake-engine serve``.

A key is the option without ``--`` and ``kv-``, with underscores: ``host``, ``advertise_host``,
``port``, ``port_range``, ``transport`` (a list), ``secret_file``, ``allow_no_secret``,
``lease_seconds``, ``transfer_timeout_seconds``. vLLM logs the whole configuration, so a secret is
given as a file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from mooncake_hal.options import Option, add_to_parser, from_arguments, options_of
from mooncake_kv.addresses import settle_addresses
from mooncake_kv.config import KVTransferConfig
from mooncake_kv.errors import KVConfigError
from mooncake_kv.pool.pool_config import KVPoolConfig, read_kv_pool

VLLM_DECIDES = ("connector", "load_failure")
"""Fields that vLLM's own configuration sets: ``kv_connector`` and ``kv_load_failure_policy``."""
POOL = "pool"
"""Key of the pool connector's stores; the value is that of ``--kv-pool``."""
LAYOUT = "layout"
"""Key of the KV cache layout to request of vLLM."""
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class _Parser(argparse.ArgumentParser):
    """A parser that raises on errors, instead of exiting the process."""

    def error(self, message: str) -> NoReturn:
        raise KVConfigError(f"kv_connector_extra_config: {message}")


def read_settings(
    extra: Mapping[str, object], connector: str, port_offset: int = 0
) -> KVTransferConfig:
    """Read the connector's configuration.

    Args:
        extra: ``kv_connector_extra_config``.
        connector: name of the connector in ``mooncake_kv``.
        port_offset: added to ``port``, so that instances that share a configuration, as
            data-parallel ranks do, use consecutive ports.

    Raises:
        KVConfigError: a key is unknown, or its value is invalid.
    """
    options = {
        _key(option): option for option in options_of(KVTransferConfig, without=VLLM_DECIDES)
    }
    unknown = sorted({*extra} - {*options, LAYOUT})
    if unknown:
        raise KVConfigError(
            f"kv_connector_extra_config has {', '.join(unknown)}, which the connector does not "
            f"know; it knows {', '.join(sorted([*options, LAYOUT]))}"
        )
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_to_parser(parser, options.values())
    words = [word for key, option in options.items() for word in option.words(extra.get(key))]
    config = from_arguments(KVTransferConfig, parser.parse_args(words), connector=connector)
    if config.port and port_offset:
        config = replace(config, port=config.port + port_offset)
    return settle_addresses(config)


def read_pool_settings(
    extra: Mapping[str, object], connector: str, port_offset: int = 0
) -> KVPoolConfig:
    """Read the configuration of the pool and its network. Arguments as in ``read_settings``.

    Raises:
        KVConfigError: ``pool`` is missing or invalid, or another key is.
    """
    pool = extra.get(POOL)
    if not isinstance(pool, str):
        raise KVConfigError(
            f"kv_connector_extra_config: {POOL} is {pool!r}; wanted its stores in a string, such "
            'as "dram=4GiB" or "connect=127.0.0.1:7701"'
        )
    others = {key: value for key, value in extra.items() if key != POOL}
    return read_kv_pool(pool).with_network(read_settings(others, connector, port_offset))


def of_data_parallel_rank(pool: KVPoolConfig, rank: int) -> KVPoolConfig:
    """Give the store of a data-parallel rank its own port and directories. All ranks share one
    configuration, but each is an instance of its own.

    Args:
        pool: the configuration that all ranks share.
        rank: the data-parallel rank. Rank 0 uses the configuration unchanged, like an instance
            without other ranks: without experts, vLLM does not tell it that there are others.

    Raises:
        KVConfigError: a directory can't be created.
    """
    if not rank:
        return pool
    ssd = tuple((path / f"dp{rank}", nbytes) for path, nbytes in pool.ssd)
    for path, _ in ssd:
        try:
            path.mkdir(exist_ok=True)  # not its parent: see SsdDirectory
        except OSError as exc:
            raise KVConfigError(
                f"pool: the store of data-parallel rank {rank} can't have {path}: {exc}"
            ) from exc
    return replace(pool, ssd=ssd, port=pool.port and pool.port + rank)


def wanted_layout(extra: Mapping[str, object], otherwise: str | None = None) -> str | None:
    """The KV cache layout to request of vLLM; None leaves the choice to vLLM.

    Args:
        extra: ``kv_connector_extra_config``.
        otherwise: the layout if the configuration names none.

    Raises:
        KVConfigError: the layout is unknown.
    """
    layout = extra.get(LAYOUT, otherwise)
    if layout is not None and layout not in LAYOUTS:
        raise KVConfigError(
            f"kv_connector_extra_config: layout {layout!r} is not known; use one of "
            f"{', '.join(LAYOUTS)}"
        )
    return None if layout is None else str(layout)


def _key(option: Option) -> str:
    return option.name.removeprefix("kv_")
