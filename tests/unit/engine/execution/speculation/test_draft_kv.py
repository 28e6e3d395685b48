"""The tracking of draft KV, against a memory that records what each slot was computed from."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_engine.execution.speculation.draft_kv import DraftKV, TokenRange

BLOCK = 4


class Memory:
    """Slots of draft KV: each records all tokens up to its own."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, tokens: list[int], table: list[int], claim: TokenRange) -> None:
        """Run the tokens of ``claim``, whose preceding tokens must have KV."""
        for position in range(claim.start, claim.stop):
            place = (table[position // BLOCK], position % BLOCK)
            self.slots[place] = tuple(tokens[: position + 1])

    def check(self, tokens: list[int], table: list[int], count: int) -> None:
        """Check that the KV of the first ``count`` tokens is in the table."""
        for position in range(count):
            place = (table[position // BLOCK], position % BLOCK)
            assert self.slots.get(place) == tuple(tokens[: position + 1]), "foreign draft KV"


def test_accepted_drafts_are_not_run_again() -> None:
    books = DraftKV(BLOCK)
    tokens, table = [1, 2, 3], [7, 8, 9]
    assert books.claim("r", tokens, lambda i: table[i:], 100) == (0, 3)
    drafted = [-1, -1, -1]  # unknown until the model has run
    for _ in range(3):
        books.add_draft("r", drafted)
    drafted[:] = 4, 5, 6
    assert books.claim("r", [*tokens, 4, 5, 9], lambda i: table[i:], 100) == (5, 6)


def test_common_prefix_is_run_once() -> None:
    books = DraftKV(BLOCK)
    prompt = list(range(10))
    assert books.claim("a", prompt, lambda i: [0, 1, 2][i:], 100) == (0, 10)
    assert books.claim("b", [*prompt, 77], lambda i: [0, 1, 3][i:], 100) == (8, 11)
    books.forget(["a", "b"])
    assert books.claim("c", prompt[:8], lambda i: [0, 1][i:], 100) == (7, 8)


def test_requests_with_another_salt_share_no_blocks() -> None:
    """A tenant could otherwise infer another tenant's prompts from the latency of drafts."""
    books = DraftKV(BLOCK)
    prompt = list(range(8))
    books.claim("a", prompt, lambda i: [0, 1][i:], 100, "one")
    books.forget(["a"])
    assert books.claim("b", prompt, lambda i: [0, 1][i:], 100, "another") == (0, 8)
    books.forget(["b"])
    assert books.claim("c", prompt, lambda i: [0, 1][i:], 100) == (0, 8)
    books.forget(["c"])
    assert books.claim("d", prompt, lambda i: [0, 1][i:], 100) == (7, 8)


def test_copied_block_is_run_again() -> None:
    books = DraftKV(BLOCK)
    tokens = list(range(6))
    books.claim("a", tokens, lambda i: [0, 1][i:], 100)
    assert books.claim("a", [*tokens, 6], lambda i: [0, 5][i:], 100) == (4, 7)


def test_reallocated_block_is_run_again() -> None:
    books = DraftKV(BLOCK)
    books.claim("a", [1], lambda i: [7][i:], 100)
    books.claim("b", [5, 6], lambda i: [7][i:], 100)  # while a was preempted
    assert books.claim("a", [1, 2], lambda i: [7][i:], 100) == (0, 2)


class DraftKVMachine(RuleBasedStateMachine):
    """Requests over few blocks, which are shared, freed and reallocated in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.memory = DraftKV(BLOCK), Memory()
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.count = 0

    @rule(length=st.integers(1, 14), family=st.integers(0, 1), shared=st.integers(0, 3))
    def begin(self, length: int, family: int, shared: int) -> None:
        """Add a request, which shares the full blocks of an earlier one with an equal prefix."""
        tokens = [10 * family + index % 3 for index in range(length)]
        table: list[int] = []
        for name, others in self.tokens.items():
            ends = range(BLOCK, min(shared * BLOCK, len(tokens), len(others) - 1) + 1, BLOCK)
            same = [end for end in ends if others[:end] == tokens[:end]]
            table = max(table, self.tables[name][: len(same)], key=len)
        name = f"r{self.count}"
        self.count += 1
        self.tables[name], self.tokens[name] = list(table), tokens
        self._grow(name, 0)

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        limit=st.integers(0, 20),
        drafted=st.lists(st.integers(0, 2), max_size=4),
        accepted=st.integers(0, 4),
    )
    def step(self, data: st.DataObject, limit: int, drafted: list[int], accepted: int) -> None:
        """Catch up, draft tokens, and append the sampled ones."""
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        self._grow(name, len(drafted))
        tokens, table = self.tokens[name], self.tables[name]
        claim = self.books.claim(name, tokens, lambda index: table[index:], limit)
        assert claim.stop - claim.start <= limit
        self.memory.check(tokens, table, claim.start)
        self.memory.run(tokens, table, claim)
        if claim.stop < len(tokens):
            return
        for index in range(len(drafted)):
            position = len(tokens) + index
            self.books.add_draft(name, drafted)
            run = TokenRange(position, position + 1)
            self.memory.run([*tokens, *drafted[: index + 1]], table, run)
        tokens += [*drafted[:accepted], data.draw(st.integers(0, 2))]
        del table[-(-(len(tokens) - 1) // BLOCK) :]  # blocks lent for drafts are freed

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def copy_the_block_that_is_written_next(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        written = (len(self.tokens[name]) - 1) // BLOCK
        if written < len(self.tables[name]):
            self.tables[name][written:] = [self._free_block()]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        del self.tokens[name], self.tables[name]
        self.books.forget([name])

    @invariant()
    def recorded_blocks_have_the_right_kv(self) -> None:
        for name, tokens in self.tokens.items():
            progress = self.books._progress.get(name)
            if progress is not None:
                self.memory.check(tokens, self.tables[name], progress.num_recorded * BLOCK)

    def _grow(self, name: str, num_draft_tokens: int) -> None:
        wanted = -(-(len(self.tokens[name]) + num_draft_tokens) // BLOCK)
        while len(self.tables[name]) < wanted:
            self.tables[name].append(self._free_block())

    def _free_block(self) -> int:
        owned = {block for table in self.tables.values() for block in table}
        return next(block for block in range(10_000) if block not in owned)


DraftKVMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestDraftKVMachine = DraftKVMachine.TestCase
