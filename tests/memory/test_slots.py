"""Whatever is stored, frozen, forked and adopted, in whatever order: no kept slot is ever the target of a store."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.memory.ssd.slots import UNWRITTEN, PageTable, Slots, SlotTable

PAGES, SLOTS = 6, 15
runs = st.integers(0, PAGES - 1).flatmap(
    lambda first: st.tuples(st.just(first), st.integers(1, PAGES - first))
)  # (first page, pages)
Contents = list[int | None]
"""What each page holds; None where it was never written."""


class Bookkeeping(RuleBasedStateMachine):
    """A slot table, a disk of numbers, and what every page of every table must read as."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(PAGES, SLOTS)
        self.disk: dict[int, int] = {}
        self.live: Contents = [None] * PAGES
        self.pinned: list[tuple[PageTable, Contents]] = []
        self.forks: list[tuple[int, PageTable, Contents]] = []
        self.loads: list[tuple[PageTable, Contents]] = []
        self.stores: list[tuple[int, Slots, int]] = []
        self.clock = 0

    def busy(self, first: int, count: int) -> bool:
        """Whether one of the pages is being stored."""
        return any(first < f + len(t) and f < first + count for f, t, _ in self.stores)

    @rule(run=runs)
    def begin_store(self, run: tuple[int, int]) -> None:
        before = self.table.table(0, PAGES)
        targets = self.table.begin_store(*run)
        after = self.table.table(0, PAGES)
        assert (before.slots == after.slots).all()
        if targets is None:
            return
        assert not self.busy(*run)
        assert len(set(targets.tolist())) == run[1]
        kept = [int(s) for t, _ in self.pinned for s in t.written]
        kept += [int(s) for _, t, _ in self.forks for s in t.written]
        kept += [int(s) for t, _ in self.loads for s in t.written]
        assert not set(targets.tolist()) & set(kept)
        self.clock += 1
        for slot in targets.tolist():
            self.disk[slot] = -1  # neither the old content nor the new
        self.stores.append((run[0], targets, self.clock))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), fails=st.booleans())
    def end_store(self, data: st.DataObject, fails: bool) -> None:
        first, targets, value = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        if fails and (self.table.table(first, len(targets)).slots != targets).all():
            self.table.abandon_store(first, targets)
            return
        for at, slot in enumerate(targets.tolist()):
            self.disk[slot] = value * 100 + first + at
            self.live[first + at] = self.disk[slot]
        self.table.end_store(first, targets, np.full(len(targets), value, np.uint64))

    @precondition(lambda self: not self.stores and len(self.pinned) < 3)
    @rule()
    def pin(self) -> None:
        table = self.table.table(0, PAGES)
        self.table.pin(table)
        self.pinned.append((table, list(self.live)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        table, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.table.unpin(table)

    @rule(run=runs)
    def fork(self, run: tuple[int, int]) -> None:
        if self.busy(*run) or any(first < run[0] + run[1] and run[0] < first + len(c) for first, _, c in self.forks):
            return
        table = self.table.table(*run)
        self.table.pin(table)
        self.forks.append((run[0], table, self.live[run[0] : run[0] + run[1]]))

    @precondition(lambda self: self.forks)
    @rule(undo=st.booleans())
    def end_fork(self, undo: bool) -> None:
        first, table, contents = self.forks[-1]
        if undo and self.busy(first, len(contents)):
            return
        self.forks.pop()
        if undo:
            self.table.adopt(first, table)
            self.live[first : first + len(contents)] = contents
        self.table.unpin(table)

    @precondition(lambda self: self.pinned)
    @rule(run=runs, to=st.integers(0, PAGES - 1))
    def adopt(self, run: tuple[int, int], to: int) -> None:
        first, count = run[0], min(run[1], PAGES - to)
        if not self.busy(to, count):
            table, contents = self.pinned[-1]
            self.table.adopt(to, table.part(first, count))
            self.live[to : to + count] = contents[first : first + count]

    @rule(run=runs)
    def forget(self, run: tuple[int, int]) -> None:
        if not self.busy(*run):
            self.table.forget(*run)
            self.live[run[0] : run[0] + run[1]] = [None] * run[1]

    @rule(run=runs)
    def begin_load(self, run: tuple[int, int]) -> None:
        table = self.table.begin_load(*run)
        assert (table is None) == self.busy(*run)
        if table is not None:
            self.loads.append((table, self.live[run[0] : run[0] + run[1]]))

    @precondition(lambda self: self.loads)
    @rule()
    def end_load(self) -> None:
        self.table.end_load(self.loads.pop(0)[0])

    def contents(self, table: PageTable) -> Contents:
        return [None if slot == UNWRITTEN else self.disk[slot] for slot in table.slots.tolist()]

    @invariant()
    def every_table_reads_as_it_was(self) -> None:
        tables = [*self.pinned, *self.loads, *((table, contents) for _, table, contents in self.forks)]
        for table, contents in tables:
            assert self.contents(table) == contents
        now = self.contents(self.table.table(0, PAGES))
        for page in range(PAGES):
            assert self.busy(page, 1) or now[page] == self.live[page]

    @invariant()
    def slots_are_free_exactly_when_nobody_has_them(self) -> None:
        tables = [table for table, _ in [*self.pinned, *self.loads]] + [table for _, table, _ in self.forks]
        had = {int(slot) for table in [*tables, self.table.table(0, PAGES)] for slot in table.written}
        had |= {slot for _, targets, _ in self.stores for slot in targets.tolist()}
        assert self.table.free == SLOTS - len(had)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def store(table: SlotTable, first: int, count: int) -> list[int]:
    targets = table.begin_store(first, count)
    assert targets is not None
    table.end_store(first, targets, np.zeros(count, np.uint64))
    return targets.tolist()


def test_a_page_that_nothing_else_keeps_stays_in_its_slot() -> None:
    table = SlotTable(4, 8)
    assert store(table, 0, 4) == store(table, 0, 4)
    assert table.free == 4


def test_adjoining_pages_take_adjoining_slots_even_when_stored_apart() -> None:
    table = SlotTable(8, 24)
    first = store(table, 0, 3)
    store(table, 6, 2)
    assert store(table, 3, 2) != [first[-1] + 1, first[-1] + 2]  # taken by then
    table.pin(table.table(0, 8))
    moved = [slot for page in range(5) for slot in store(table, page, 1)]
    assert moved == list(range(moved[0], moved[0] + 5))


def test_a_store_without_enough_free_slots_changes_nothing() -> None:
    table = SlotTable(4, 6)
    store(table, 0, 4)
    pinned = table.table(0, 4)
    table.pin(pinned)
    assert table.begin_store(0, 3) is None
    assert (table.lacks(0, 3), table.free) == (1, 2)
    store(table, 0, 2)
    assert table.free == 0
    table.unpin(pinned)
    assert table.free == 2


def test_a_slot_that_is_still_read_is_not_handed_out() -> None:
    table = SlotTable(1, 2)
    store(table, 0, 1)
    pinned = table.table(0, 1)
    table.pin(pinned)
    reading = table.begin_load_of(pinned)
    store(table, 0, 1)
    table.unpin(pinned)
    assert (table.free, table.in_transit) == (0, True)
    table.end_load(reading)
    assert (table.free, table.in_transit) == (1, False)


@pytest.mark.parametrize(("pages", "slots"), [(0, 1), (3, 2)])
def test_pages_that_do_not_fit_are_refused(pages: int, slots: int) -> None:
    with pytest.raises(ValueError, match="slots"):
        SlotTable(pages, slots)
