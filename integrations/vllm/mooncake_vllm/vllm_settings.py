"""Reads ``kv_connector_extra_config``: what ``mooncake-engine serve`` takes on its command line.

A key is the option without ``--`` and ``kv-``, with underscores: ``host``, ``advertise_host``,
``port``, ``port_range``, ``transport`` (a list), ``secret_file``, ``allow_no_secret``,
``lease_seconds``, ``transfer_timeout_seconds``. vLLM logs the whole configuration, so that a
secret is named by file.
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
"""Fields that vLLM's own configuration has: ``kv_connector`` and ``kv_load_failure_policy``."""
POOL = "pool"
"""Key of the stores, for the pool's connector: what ``--kv-pool`` takes."""
LAYOUT = "layout"
"""Key of the KV cache layout that vLLM is asked for."""
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


class _Parser(argparse.ArgumentParser):
    """Raises where a command line would end the process."""

    def error(self, message: str) -> NoReturn:
        raise KVConfigError(f"kv_connector_extra_config: {message}")


def read_settings(
    extra: Mapping[str, object], connector: str, port_offset: int = 0
) -> KVTransferConfig:
    """The connector's configuration.

    Args:
        extra: ``kv_connector_extra_config``.
        connector: name of the connector of ``mooncake_kv``.
        port_offset: added to ``port``: instances that share a configuration, as data-parallel
            ranks do, take neighbouring ones.

    Raises:
        KVConfigError: a key is not known, or its value makes no sense.
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
    """The pool, and its network. Arguments as ``read_settings`` takes them.

    Raises:
        KVConfigError: ``pool`` is missing or makes no sense, or another key.
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
    """The pool, with a port and directories that the store in this rank has for itself. What ranks
    have in common, they are told once, and each is an instance of its own.

    Args:
        pool: as all of them are told.
        rank: which one. The first one takes what is there, as an instance without others does: of a
            model without experts vLLM does not tell it that there are others.

    Raises:
        KVConfigError: a directory for it can't be made.
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
    """The KV cache layout to ask vLLM for; None leaves the choice to vLLM.

    Args:
        extra: ``kv_connector_extra_config``.
        otherwise: what to ask for where that names none.

    Raises:
        KVConfigError: there is none of that name.
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
