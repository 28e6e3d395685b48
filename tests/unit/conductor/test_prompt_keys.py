"""Keys of a prompt's chunks: prefixes share them, other adapters and tenants don't."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from mooncake_conductor.index.prompt_keys import (
    CHUNK_TOKENS,
    MAX_CHUNKS,
    chain_root,
    text_keys,
    token_keys,
)

IDS = st.lists(st.integers(0, 2**31), max_size=300)


@given(IDS, IDS)
def test_what_two_prompts_have_in_common_has_the_same_keys(
    first: list[int], tail: list[int]
) -> None:
    short, long = token_keys(first), token_keys([*first, *tail])
    assert long[: len(short)] == short
    assert len(long) == len([*first, *tail]) // CHUNK_TOKENS


def test_another_token_changes_all_keys_from_there_on() -> None:
    ids = list(range(5 * CHUNK_TOKENS))
    changed = [*ids]
    changed[2 * CHUNK_TOKENS] += 1
    same = [a == b for a, b in zip(token_keys(ids), token_keys(changed), strict=True)]
    assert same == [True, True, False, False, False]


def test_other_adapters_tenants_and_kinds_share_nothing() -> None:
    roots = {chain_root(), chain_root("a"), chain_root("", "a"), chain_root("a", "a")}
    assert len(roots) == 4
    ids = [0] * CHUNK_TOKENS
    keys = {token_keys(ids, root)[0] for root in roots} | {text_keys(bytes(4 * CHUNK_TOKENS))[0]}
    assert len(keys) == 5


def test_a_repeated_chunk_has_another_key_each_time_and_long_prompts_end() -> None:
    keys = token_keys([7] * (CHUNK_TOKENS * (MAX_CHUNKS + 3)))
    assert len(keys) == MAX_CHUNKS
    assert all(a != b for a, b in pairwise(keys))


def test_ids_that_no_model_has_give_no_keys() -> None:
    assert token_keys([-1] * CHUNK_TOKENS) == ()
