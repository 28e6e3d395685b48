from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mooncake_engine.errors import ConfigError
from mooncake_engine.models.parallel_context import share_heads
from mooncake_hal.kv.geometry import head_range


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 24))
def test_every_query_head_is_computed_once_with_its_kv_head(
    num_kv_heads: int, group: int, tp_size: int
) -> None:
    num_heads = num_kv_heads * group
    try:
        shares = [share_heads(num_heads, num_kv_heads, tp_size, r) for r in range(tp_size)]
    except ConfigError:
        assert -(-tp_size // num_kv_heads) > group
        return
    computed = [head for s in shares for head in range(s.query_start, s.query_stop)]
    assert computed == list(range(num_heads))
    for rank, share in enumerate(shares):
        assert share.query_heads > 0
        assert (share.kv_start, share.kv_stop) == head_range(num_kv_heads, tp_size, rank)
        # local query head q uses local kv head q // (queries per kv head)
        ratio, rest = divmod(share.query_heads, share.kv_heads)
        assert rest == 0
        for index, head in enumerate(range(share.query_start, share.query_stop)):
            assert head // group == share.kv_start + index // ratio


def test_error_names_the_largest_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match="use at most 6 ranks"):
        share_heads(6, 2, 8, 0)
