"""A key table behaves like a dict, while it grows and after many removals."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings, strategies as st

from mooncake_conductor.index.key_table import KeyTable, as_keys

KEYS = st.lists(st.integers(0, 400) | st.integers(0, 2**64 - 1), max_size=120)


@given(st.lists(st.tuples(st.sampled_from(["add", "change", "remove"]), KEYS), max_size=25))
@settings(deadline=None, max_examples=60)
def test_key_table_behaves_like_a_dict(steps: list[tuple[str, list[int]]]) -> None:
    table, truth = KeyTable(), {}
    for number, (act, given_keys) in enumerate(steps, 1):
        keys = list(dict.fromkeys(given_keys))
        if act == "add":
            if any(key in truth for key in keys):
                assert not keys or not table.add_new(as_keys(keys), number)
                keys = [key for key in keys if key not in truth]
            if not keys or not table.add_new(as_keys(keys), number):
                table.add(as_keys(keys), number)
            truth |= dict.fromkeys(keys, number)
        elif act == "change":
            keys = [key for key in keys if key in truth]
            table.change(as_keys(keys), number)
            truth |= dict.fromkeys(keys, number)
        else:
            table.remove(as_keys(keys))
            for key in keys:
                truth.pop(key, None)
        assert len(table) == len(truth)
        found = table.find(as_keys(given_keys)).tolist()
        assert found == [truth.get(key, 0) for key in given_keys]
    known = list(truth)
    assert table.find(as_keys(known)).tolist() == list(truth.values())
    assert [table.get(key) for key in known] == list(truth.values())


def test_table_reuses_slots_while_growing_and_removing() -> None:
    rng, table, live = random.Random(1), KeyTable(), {}
    for number in range(1, 1500):
        keys = [rng.getrandbits(64) for _ in range(64)]
        table.add(as_keys(keys), number)
        live |= dict.fromkeys(keys, number)
        if number > 400:
            gone = list(live)[:64]
            table.remove(as_keys(gone))
            for key in gone:
                del live[key]
        if number % 50 == 0:
            assert table.find(as_keys(list(live))).tolist() == list(live.values())
    assert len(table) == len(live)
    assert table._buckets.num_buckets * 8 <= 8 * len(live), "slots of removed keys are reused"


def test_scan_returns_every_key_and_its_value() -> None:
    rng, table = random.Random(2), KeyTable()
    keys = [rng.getrandbits(64) for _ in range(5000)]
    for start in range(0, 5000, 100):
        table.add(as_keys(keys[start : start + 100]), start // 100 + 1)
    table.scan(1.0)  # completes the growth
    found = {}
    for _ in range(8):
        some, numbers = table.scan(1 / 8)
        found |= dict(zip(some.tolist(), numbers.tolist(), strict=True))
    assert found == {key: at // 100 + 1 for at, key in enumerate(keys)}


def test_key_that_mixes_to_the_empty_marker_is_stored() -> None:
    table = KeyTable()
    key = 0x9E3779B97F4A7C15
    assert table.find(as_keys([key])).tolist() == [0]
    table.add(as_keys([key]), 3)
    assert (table.find(as_keys([key])).tolist(), table.get(key)) == ([3], 3)
    table.remove(as_keys([key]))
    assert (len(table), table.get(key)) == (0, 0)


def test_keys_of_one_bucket_are_found() -> None:
    table = KeyTable()
    inverse = pow(0xD6E8FEB86659FD93, -1, 1 << 64)
    mixed = np.arange(2, 42, dtype=np.uint64)  # all in the first bucket
    keys = (mixed * np.uint64(inverse)) ^ np.uint64(0x9E3779B97F4A7C15)
    table.add(keys, 7)
    assert set(table.find(keys).tolist()) == {7}
    table.remove(keys[:30])
    assert table.find(keys).tolist() == [0] * 30 + [7] * 10
    table.add(keys[:5], 9)
    assert table.find(keys).tolist() == [9] * 5 + [0] * 25 + [7] * 10
