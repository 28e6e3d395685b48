"""Puts the packages that pyproject.toml lists into the wheel, from where they are developed."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DevelopmentPackages(BuildHookInterface):  # type: ignore[type-arg]  # of the builder's config
    """An editable install needs no copies: the folders that they lie in are on the path."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the packages to a wheel that is to be installed elsewhere."""
        if version != "editable":
            build_data["force_include"].update(self.config["packages"])
