"""Step plans become tensors: a mixed batch by hand, and random batches against a loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from mooncake_engine.execution.input_batch import InputBuilder, StepInputs
from mooncake_engine.execution.request_table import BlockTables, RequestTable
from mooncake_engine.execution.speculation.drafts import StepDrafts, make_draft
from mooncake_engine.sampling_params import SamplingParams
from mooncake_engine.scheduling.step_plan import NewRequest, ScheduledSequence

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.0)


def lay_out(
    table: RequestTable, sequences: list[ScheduledSequence], block_size: int = 4
) -> StepInputs:
    states = [table[sequence.request_id] for sequence in sequences]
    return InputBuilder(table, block_size, CPU).build(sequences, states)


def admit(table: RequestTable, name: str, tokens: range, blocks: tuple[int, ...]) -> None:
    table.admit([NewRequest(name, tuple(tokens), len(tokens), PARAMS, 0, blocks)])


def test_decodes_prompts_and_chunks_in_one_batch() -> None:
    table = RequestTable(4, 8, 100, CPU)
    admit(table, "decode", range(10, 16), (7, 2))
    admit(table, "chunk", range(20, 40), (5, 1, 3))
    admit(table, "last", range(50, 53), (6,))
    inputs = lay_out(
        table,
        [
            ScheduledSequence("decode", 5, 1),
            ScheduledSequence("chunk", 4, 5, is_sampling=False),
            ScheduledSequence("last", 2, 1),
        ],
    )
    assert inputs.token_ids.tolist() == [15, 24, 25, 26, 27, 28, 52]
    assert inputs.positions.tolist() == [5, 4, 5, 6, 7, 8, 2]
    assert inputs.attention.slot_mapping.tolist() == [9, 4, 5, 6, 7, 12, 26]
    assert inputs.attention.num_decodes == 1
    assert inputs.attention.query_start.tolist() == [0, 1, 6, 7]
    assert inputs.attention.context_lens.tolist() == [6, 9, 3]
    assert inputs.attention.block_tables[1].tolist() == [5, 1, 3]
    assert inputs.sampled_rows is not None
    assert inputs.sampled_rows.tolist() == [0, 6]
    assert [state.request_id for state in inputs.sampling] == ["decode", "last"]


def test_a_batch_of_decodes_samples_every_row() -> None:
    table = RequestTable(1, 8, 100, CPU)
    for index in range(5):
        admit(table, f"r{index}", range(index + 3), (index, index + 10))
    inputs = lay_out(table, [ScheduledSequence(f"r{i}", i + 2, 1) for i in range(5)])
    assert inputs.sampled_rows is None
    assert inputs.attention.num_decodes == 5
    assert inputs.token_ids.tolist() == [2, 3, 4, 5, 6]


def test_what_is_kept_of_earlier_decodes_changes_no_later_step() -> None:
    """Requests advance into a new block, one ends, and another one takes its row."""
    table = RequestTable(2, 8, 100, CPU)
    kept = InputBuilder(table, 4, CPU)
    admit(table, "stays", range(10, 15), (7, 2))
    admit(table, "ends", range(20, 27), (5, 3))
    steps = [{"stays": 4, "ends": 6}, {"stays": 4}, {"ends": 6, "stays": 4}, {"stays": 4, "new": 8}]
    for step in steps:
        if "new" in step:
            table.remove(["ends"])
            admit(table, "new", range(30, 39), (4, 6, 1))
            table.tables.extend(table["stays"].row, (9,))
        sequences = [ScheduledSequence(name, start, 1) for name, start in step.items()]
        states = [table[name] for name in step]
        found, wanted = (b.build(sequences, states) for b in (kept, InputBuilder(table, 4, CPU)))
        assert found.sampling == states
        assert found.sampled_rows is None
        assert found.attention.host_query_lens == wanted.attention.host_query_lens
        assert found.attention.host_context_lens == tuple(start + 1 for start in step.values())
        for name in ("query_start", "context_lens", "block_tables", "slot_mapping"):
            assert getattr(found.attention, name).equal(getattr(wanted.attention, name)), name
        assert found.token_ids.tolist() == [table[n].token_ids[at] for n, at in step.items()]
        assert found.positions.tolist() == list(step.values())


def test_tokens_that_the_device_alone_knows_are_taken_over() -> None:
    table = RequestTable(2, 8, 100, CPU)
    admit(table, "r", range(10, 15), (7, 2))
    newest = torch.tensor([99])
    inputs = InputBuilder(table, 4, CPU).build(
        [ScheduledSequence("r", 5, 1)], [table["r"]], newest=newest
    )
    assert inputs.token_ids is newest
    assert inputs.attention.slot_mapping.tolist() == [9]


@pytest.mark.parametrize("on_device", [None, torch.tensor([77, -1])], ids=["known", "on a device"])
def test_drafts_are_sequences_of_their_own_after_their_requests(on_device: Tensor | None) -> None:
    table = RequestTable(4, 8, 100, CPU)
    admit(table, "drafted", range(10, 16), (7, 2))
    admit(table, "plain", range(30, 33), (4,))
    admit(table, "prompt", range(50, 53), (6,))
    sequences = [
        ScheduledSequence("drafted", 5, 1, num_draft_tokens=4),
        ScheduledSequence("plain", 2, 1, num_draft_tokens=4),
        ScheduledSequence("prompt", 0, 3),
    ]
    draft = make_draft(table["drafted"], [77, 78] if on_device is None else [-1, -1])
    assert draft is not None
    drafts = StepDrafts({"drafted": draft}, on_device)
    states = [table[sequence.request_id] for sequence in sequences]
    inputs = InputBuilder(table, 4, CPU).build(sequences, states, drafts)
    drafted = [77, 78] if on_device is None else [77, 0]  # -1 becomes any valid token
    assert inputs.token_ids.tolist() == [15, *drafted, 32, 50, 51, 52]
    assert inputs.positions.tolist() == [5, 6, 7, 2, 0, 1, 2]
    assert inputs.attention.num_decodes == 4
    assert inputs.attention.context_lens.tolist() == [6, 7, 8, 3, 3]
    assert inputs.attention.slot_mapping.tolist() == [9, 10, 11, 18, 24, 25, 26]
    assert inputs.attention.block_tables[:3].tolist() == [[7, 2]] * 3
    assert inputs.sampled_rows is not None
    assert inputs.sampled_rows.tolist() == [0, 1, 2, 3, 6]
    assert [state.request_id for state in inputs.sampling] == ["drafted", "plain", "prompt"]


@given(st.data())
def test_slot_mapping_equals_that_of_a_loop(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    table = RequestTable(2, 64, 1000, CPU)
    sequences, expected = [], []
    for index in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 40))
        start = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - start))
        blocks = data.draw(
            st.lists(st.integers(0, 99), min_size=-(-length // block_size), max_size=64)
        )
        admit(table, f"r{index}", range(length), tuple(blocks[:64]))
        sequences.append(ScheduledSequence(f"r{index}", start, count))
        expected += [
            blocks[position // block_size] * block_size + position % block_size
            for position in range(start, start + count)
        ]
    inputs = lay_out(table, sequences, block_size)
    assert inputs.attention.slot_mapping.tolist() == expected


def gathered(tables: BlockTables, rows: list[int], num_blocks: int) -> list[list[int]]:
    changes = [torch.from_numpy(array) for array in tables.take_changes()]
    found: list[list[int]] = tables.gather(torch.tensor(rows), num_blocks, changes).tolist()
    return found


@pytest.mark.parametrize("is_accelerator", [False, True], ids=["on the host", "on an accelerator"])
def test_rows_are_reused_and_grow(*, is_accelerator: bool) -> None:
    tables = BlockTables(1, 4, CPU, is_accelerator=is_accelerator)
    first = tables.take_row((1, 2))
    second = tables.take_row((3,))
    assert first != second
    tables.extend(second, (4, 5))
    tables.free_row(first)
    assert tables.take_row((9,)) == first
    assert gathered(tables, [second, first], 2) == [[3, 4], [9, 2]]
    assert tables.find(np.array([second, first]), np.array([1, 0])).tolist() == [4, 9]
    tables.extend(second, (8,), at=1)
    assert gathered(tables, [second], 3) == [[3, 8, 5]]


def test_accelerator_receives_only_the_changes() -> None:
    tables = BlockTables(2, 100, CPU, is_accelerator=True)
    first, second = tables.take_row(tuple(range(50))), tables.take_row((60,))
    assert gathered(tables, [second, first], 2) == [[60, 0], [0, 1]]
    assert tables.take_changes() == ()
    tables.extend(first, (77, 78))
    tables.extend(first, (79,), at=51)
    cells, block_ids = tables.take_changes()
    assert dict(zip(cells.tolist(), block_ids.tolist(), strict=False)) == {
        100 * first + 50: 77,
        100 * first + 51: 79,
    }


def test_admitting_a_request_again_replaces_its_state() -> None:
    table = RequestTable(4, 8, 100, CPU)
    admit(table, "r", range(4), (1,))
    admit(table, "r", range(6), (2, 3))
    assert len(table) == 1
    assert table["r"].token_ids == list(range(6))
    table.remove(("r", "never-seen"))
    assert len(table) == 0
