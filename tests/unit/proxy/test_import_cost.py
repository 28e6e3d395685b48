"""Flags are parsed and rejected before most of the proxy is imported."""

from __future__ import annotations

from support.programs import imported_by

ONLY_TO_SERVE = {
    "uvloop",
    "numpy",
    "mooncake_api.api_formats",
    "mooncake_api.request_body",
    "mooncake_conductor.conductor",
    "mooncake_conductor.errors",
    "mooncake_proxy.api.application",
}


def test_help_imports_no_server_modules() -> None:
    modules = imported_by("-m", "mooncake_proxy", "--help")
    assert "mooncake_proxy.proxy_options" in modules
    assert modules.isdisjoint(ONLY_TO_SERVE), modules & ONLY_TO_SERVE
