"""Which layers of which tokens are due for sending, and when: each exactly once, with or without
callbacks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings, strategies as st

from mooncake_kv.push_progress import Portion, PromptProgress, merge_portions

LAYERS = (2, 6)


def pieces(portions: list[Portion]) -> Counter[tuple[int, int]]:
    """(layer, token) pairs."""
    return Counter(
        (layer, token)
        for portion in portions
        for layer in range(*portion.layers)
        for token in range(*portion.tokens)
    )


def whole(stop: int) -> Counter[tuple[int, int]]:
    return Counter((layer, token) for layer in range(*LAYERS) for token in range(stop))


def test_layer_is_due_once_computed() -> None:
    progress = PromptProgress(LAYERS)
    progress.begin_pass([7, 8])
    assert progress.begin_step(20, []) == []
    assert progress.layer_done(2) == Portion(1, (0, 20), (2, 3), (7, 8))
    assert progress.layer_done(2) is None
    assert progress.layer_done(9) is None


def test_consecutive_chunks_use_their_blocks() -> None:
    progress = PromptProgress(LAYERS)
    progress.begin_pass([7])
    progress.begin_step(16, [])
    progress.layer_done(3)
    left = progress.begin_step(32, [9])
    assert [(portion.layers, portion.block_ids) for portion in left] == [
        ((2, 3), (7,)),
        ((4, 6), (7,)),
    ]
    assert progress.layer_done(2) == Portion(1, (16, 32), (2, 3), (7, 9))


def test_cached_prefix_is_due_with_first_step() -> None:
    progress = PromptProgress(LAYERS)
    progress.begin_pass([1, 2, 3])
    progress.begin_step(48, [])  # only tokens from 32 on are computed
    due = progress.layer_done(2)
    assert due is not None
    assert due.tokens == (0, 48)


def test_recomputed_request_sends_everything_again() -> None:
    progress = PromptProgress(LAYERS)
    progress.begin_pass([1])
    progress.begin_step(16, [])
    progress.layer_done(2)
    progress.begin_pass([5, 6])
    progress.begin_step(20, [])
    assert progress.layer_done(2) == Portion(2, (0, 20), (2, 3), (5, 6))


def test_step_without_callbacks_is_due_at_its_end() -> None:
    progress = PromptProgress(LAYERS)
    left = progress.end_pass(30, [4, 5])
    assert left == [Portion(0, (0, 30), LAYERS, (4, 5))]
    assert progress.end_pass(30, [4, 5]) == []


def test_portions_of_adjacent_layers_are_merged() -> None:
    one = [Portion(1, (0, 9), (layer, layer + 1), (3,)) for layer in (2, 3, 5)]
    other = Portion(1, (9, 12), (6, 7), (3,))
    merged = merge_portions([*one, other])
    assert [portion.layers for portion in merged] == [(2, 4), (5, 6), (6, 7)]


@settings(max_examples=300)
@given(st.data())
def test_every_layer_of_every_token_is_due_exactly_once_per_pass(data: st.DataObject) -> None:
    progress = PromptProgress(LAYERS)
    stop = data.draw(st.integers(1, 40))
    num_passes = data.draw(st.integers(1, 3))
    for number in range(1, num_passes + 1):
        due: list[Portion] = []
        progress.begin_pass([0, 1, 2])
        at = 0
        while at < stop and (number == num_passes or data.draw(st.booleans())):
            at = data.draw(st.integers(at + 1, stop))
            due += progress.begin_step(at, [])
            for layer in data.draw(st.lists(st.integers(*LAYERS), max_size=6)):
                portion = progress.layer_done(layer)
                due += [portion] if portion else []
        if number == num_passes:
            due += progress.end_pass(stop, [0, 1, 2])
            assert pieces(due) == pieces(merge_portions(due)) == whole(stop)
            assert {portion.pass_number for portion in due} == {number}
