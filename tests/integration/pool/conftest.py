"""What the tests of the pool share."""

import pytest

from mooncake_kv.pool.pool_costs import PrefillCosts


@pytest.fixture
def always_loads(monkeypatch):
    """What is found is loaded, however little time computing it takes on so small a model."""
    monkeypatch.setattr(PrefillCosts, "is_known", False)
