"""Plugin hooks (pluggy): one returns a BackendSpec, one a TransportSpec.

Hooks only return specs; from then on the engine calls plain methods.

A plugin is a module named by an entry point of the group ``mooncake_hal``::

    @hookimpl
    def mooncake_hal_backend() -> BackendSpec:
        return BackendSpec(name="mychip", api_version=1, priority=90, probe=probe, load=load)
"""

from __future__ import annotations

import pluggy

from mooncake_hal.specs import BackendSpec, TransportSpec

PROJECT_NAME = "mooncake_hal"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec
def mooncake_hal_backend() -> BackendSpec:  # type: ignore[empty-body]  # pluggy calls the implementations
    """Offer one compute backend."""


@hookspec
def mooncake_hal_transport() -> TransportSpec:  # type: ignore[empty-body]  # pluggy calls the implementations
    """Offer one way of moving KV."""
