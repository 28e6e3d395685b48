"""Chunk keys of a prompt: shared by equal prefixes, distinct between adapters and tenants."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from mooncake_conductor.index.prompt_keys import (
    CHUNK_TOKENS,
    MAX_CHUNKS,
    are_published,
    chain_root,
    text_keys,
    token_keys,
)

IDS = st.lists(st.integers(0, 2**31), max_size=300)


@given(IDS, IDS)
def test_equal_prefixes_have_equal_keys(first: list[int], tail: list[int]) -> None:
    short, long = token_keys(first), token_keys([*first, *tail])
    assert long[: len(short)] == short
    assert len(long) == len([*first, *tail]) // CHUNK_TOKENS


def test_changed_token_changes_all_later_keys() -> None:
    ids = list(range(5 * CHUNK_TOKENS))
    changed = [*ids]
    changed[2 * CHUNK_TOKENS] += 1
    same = [a == b for a, b in zip(token_keys(ids), token_keys(changed), strict=True)]
    assert same == [True, True, False, False, False]


def test_adapters_tenants_and_text_keys_are_distinct() -> None:
    roots = {chain_root(), chain_root("a"), chain_root("", "a"), chain_root("a", "a")}
    assert len(roots) == 4
    ids = [0] * CHUNK_TOKENS
    keys = {token_keys(ids, root)[0] for root in roots} | {text_keys(bytes(4 * CHUNK_TOKENS))[0]}
    assert len(keys) == 5


def test_keys_of_tokens_that_are_not_exact_are_never_those_of_published_blocks() -> None:
    ids = list(range(50 * CHUNK_TOKENS))
    exact, others = token_keys(ids), token_keys(ids, is_exact=False)
    assert len(exact) == len(others)
    assert are_published(exact)
    assert max(exact) < 1 << 63 <= min(others)
    assert not are_published(others)
    assert not are_published(text_keys(bytes(4 * CHUNK_TOKENS)))


def test_repeated_chunks_have_distinct_keys_up_to_max_chunks() -> None:
    keys = token_keys([7] * (CHUNK_TOKENS * (MAX_CHUNKS + 3)))
    assert len(keys) == MAX_CHUNKS
    assert all(a != b for a, b in pairwise(keys))


def test_invalid_token_ids_give_no_keys() -> None:
    assert token_keys([-1] * CHUNK_TOKENS) == ()
