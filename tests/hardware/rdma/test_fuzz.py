"""Malformed messages, over verbs."""

from __future__ import annotations

import pytest
from support.rdma_fuzz import RdmaFuzz

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]


class TestFuzz(RdmaFuzz):
    """Between two endpoints of one process."""
