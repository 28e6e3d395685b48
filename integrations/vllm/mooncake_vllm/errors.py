"""Every error of mooncake_vllm.

KVConfigError (of mooncake_kv)
└── UnsupportedByVllmConnector   a model, layout or option of vLLM whose KV can't be handed over yet
ConnectorDied                    the connector can't go on, and neither can the engine
"""

from __future__ import annotations

from mooncake_kv.errors import KVConfigError, KVError


class UnsupportedByVllmConnector(KVConfigError):
    """A model, layout or option of vLLM whose KV can't be handed over: names it."""


class ConnectorDied(KVError):
    """A background thread of the connector, or a rank's, died of a defect. It may have left reads
    under way, so that no block can be called free any more: the engine has to end."""
