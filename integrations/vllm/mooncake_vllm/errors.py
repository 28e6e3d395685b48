"""Every error of mooncake_vllm.

KVConfigError (of mooncake_kv)
└── UnsupportedByVllmConnector   a model, layout or option of vLLM whose KV can't be transferred yet
ConnectorDied                    the connector can't continue, and neither can the engine
"""

from __future__ import annotations

from mooncake_kv.errors import KVConfigError, KVError


class UnsupportedByVllmConnector(KVConfigError):
    """A model, layout or option of vLLM whose KV can't be transferred; names it."""


class ConnectorDied(KVError):
    """A background thread of the connector, or of a rank, died. Reads may still be in flight, so no
    block can be considered free any more, and the engine has to end."""
