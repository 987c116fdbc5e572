"""Whatever is stored, frozen, forked and adopted, in whatever order: no kept slot is ever the target of a store."""

import numpy as np
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagoda.memory.page import PageRun
from pagoda.memory.ssd.slots import UNWRITTEN, PageTable, Slots, SlotTable

PAGES, SLOTS = 6, 15
runs = st.integers(0, PAGES - 1).flatmap(
    lambda first: st.builds(PageRun, st.just(first), st.integers(1, PAGES - first))
)
ALL = PageRun(0, PAGES)
Contents = list[int | None]
"""What each page holds; None where it was never written."""


def overlap(one: PageRun, other: PageRun) -> bool:
    return one.start < other.stop and other.start < one.stop


class Bookkeeping(RuleBasedStateMachine):
    """A slot table, a disk of numbers, and what every page of every table must read as."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(PAGES, SLOTS)
        self.disk: dict[int, int] = {}
        self.live: Contents = [None] * PAGES
        self.pinned: list[tuple[PageTable, Contents]] = []
        self.forks: list[tuple[PageRun, PageTable, Contents]] = []
        self.loads: list[tuple[PageRun, PageTable, Contents]] = []
        self.stores: list[tuple[PageRun, Slots, int]] = []
        self.clock = 0

    def storing(self, run: PageRun) -> bool:
        """Whether one of the pages is being stored."""
        return any(overlap(run, stored) for stored, _, _ in self.stores)

    def busy(self, run: PageRun) -> bool:
        """Whether one of the pages is being stored or loaded."""
        return self.storing(run) or any(overlap(run, loaded) for loaded, _, _ in self.loads)

    @precondition(lambda self: self.table.pages < PAGES + 2)
    @rule()
    def extend(self) -> None:
        self.table.grow(self.table.slots + 1)
        self.table.extend(self.table.pages + 1)

    @rule(run=runs)
    def begin_store(self, run: PageRun) -> None:
        before = self.table.table(ALL)
        targets = self.table.begin_store(run)
        after = self.table.table(ALL)
        assert (before.slots == after.slots).all()
        if targets is None:
            return
        assert not self.busy(run)
        assert len(set(targets.tolist())) == run.count
        kept = [int(s) for t, _ in self.pinned for s in t.written]
        kept += [int(s) for _, t, _ in self.forks for s in t.written]
        kept += [int(s) for _, t, _ in self.loads for s in t.written]
        assert not set(targets.tolist()) & set(kept)
        self.clock += 1
        for slot in targets.tolist():
            self.disk[slot] = -1  # neither the old content nor the new
        self.stores.append((run, targets, self.clock))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), fails=st.booleans())
    def end_store(self, data: st.DataObject, fails: bool) -> None:
        run, targets, value = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
        if fails and (self.table.table(run).slots != targets).all():
            self.table.abandon_store(run, targets)
            return
        for at, slot in enumerate(targets.tolist()):
            self.disk[slot] = value * 100 + run.start + at
            self.live[run.start + at] = self.disk[slot]
        self.table.end_store(run, targets, np.full(len(targets), value, np.uint64))

    @precondition(lambda self: not self.stores and len(self.pinned) < 3)
    @rule()
    def pin(self) -> None:
        table = self.table.table(ALL)
        self.table.pin(table)
        self.pinned.append((table, list(self.live)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        table, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.table.unpin(table)

    @rule(run=runs)
    def fork(self, run: PageRun) -> None:
        if self.storing(run) or any(overlap(run, forked) for forked, _, _ in self.forks):
            return
        table = self.table.table(run)
        self.table.pin(table)
        self.forks.append((run, table, self.live[run.start : run.stop]))

    @precondition(lambda self: self.forks)
    @rule(undo=st.booleans())
    def end_fork(self, undo: bool) -> None:
        run, table, contents = self.forks[-1]
        if undo and self.busy(run):
            return
        self.forks.pop()
        if undo:
            self.table.adopt(run, table)
            self.live[run.start : run.stop] = contents
        self.table.unpin(table)

    @precondition(lambda self: self.pinned)
    @rule(run=runs, to=st.integers(0, PAGES - 1))
    def adopt(self, run: PageRun, to: int) -> None:
        count = min(run.count, PAGES - to)
        its, here = PageRun(run.start, count), PageRun(to, count)
        if not self.busy(here):
            table, contents = self.pinned[-1]
            self.table.adopt(here, table.part(its))
            self.live[here.start : here.stop] = contents[its.start : its.stop]

    @rule(run=runs)
    def begin_load(self, run: PageRun) -> None:
        table = self.table.begin_load(run)
        assert (table is None) == self.storing(run)
        if table is not None:
            self.loads.append((run, table, self.live[run.start : run.stop]))

    @precondition(lambda self: self.loads)
    @rule()
    def end_load(self) -> None:
        self.table.end_load(self.loads.pop(0)[0])

    def contents(self, table: PageTable) -> Contents:
        return [None if slot == UNWRITTEN else self.disk[slot] for slot in table.slots.tolist()]

    @invariant()
    def every_table_reads_as_it_was(self) -> None:
        tables = [*self.pinned, *((table, contents) for _, table, contents in [*self.loads, *self.forks])]
        for table, contents in tables:
            assert self.contents(table) == contents
        now = self.contents(self.table.table(ALL))
        for page in range(PAGES):
            assert self.storing(PageRun(page, 1)) or now[page] == self.live[page]

    @invariant()
    def slots_are_free_exactly_when_nobody_has_them(self) -> None:
        tables = [table for table, _ in self.pinned] + [table for _, table, _ in [*self.loads, *self.forks]]
        had = {int(slot) for table in [*tables, self.table.table(ALL)] for slot in table.written}
        had |= {slot for _, targets, _ in self.stores for slot in targets.tolist()}
        assert self.table.free == self.table.slots - len(had)


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
