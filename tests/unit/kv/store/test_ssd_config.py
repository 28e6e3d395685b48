"""The write budget of an SSD tier."""

from mooncake_kv.store.ssd_config import SsdBudget


def test_budget_fills_over_the_day():
    budget = SsdBudget(86_400, full_s=10)
    assert budget.take(10, now=0)
    assert budget.left(now=0.5) == 0
    assert not budget.take(1, now=0.5)
    assert (budget.left(now=1), budget.left(now=8), budget.left(now=1000)) == (1, 8, 10)
    assert budget.take(1, now=1)
    assert budget.take(10, now=1000)
    assert not budget.take(1, now=1000)
    assert SsdBudget(86_400, full_s=10).left(now=0) == 10
    assert SsdBudget(0).take(1 << 50, now=0)
    assert SsdBudget(0).left(now=0) == 0
