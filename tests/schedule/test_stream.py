"""Whatever the order in which blocks end, each block of an update is read, updated and written once, in a slot that
nobody else uses. Updates end, with or without errors, and reading ahead holds up nothing."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from pagoda.plan.blocks import StreamPlan, UnitBlocks
from pagoda.schedule.stream import Action, Block, Do, Stream

UNITS = 6
SEEDS = st.integers(0, 1 << 32)


@dataclass(eq=False)
class Asked:
    """An update that was asked for, and what became of it."""

    unit: int
    blocks: list[int]
    may_read_ahead: bool = False
    updated: list[int] = field(default_factory=list)
    said: list[Do] = field(default_factory=list)
    error: BaseException | None = None


def spread(pages: list[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Block -> the latest earlier block with its first page, and all of them that have it."""
    return {
        block: earlier
        for block, (first, _) in enumerate(pages)
        if (earlier := tuple(index for index, (_, last) in enumerate(pages[:block]) if last >= first))
    }


def some_plan(rng: Random) -> tuple[StreamPlan, list[list[tuple[int, int]]]]:
    """A plan, and the first and last page of each block of each unit."""
    two, whole = rng.random() < 0.6, rng.random() < 0.5
    units, pages = [], []
    for _ in range(UNITS):
        count, page = rng.randint(1, 7), 0
        of_unit = []
        for _ in range(count):
            last = page + rng.randint(0, 2)
            of_unit.append((page, last))
            page = last + (rng.random() < 0.4 if whole else 1)
        streamed, updater = rng.random() < 0.7, int(two and rng.random() < 0.5)
        takes = rng.random() < 0.8 if updater or not streamed else False
        units.append(UnitBlocks([(n, n + 1) for n in range(count)], updater, streamed, takes, spread(of_unit)))
        pages.append(of_unit)
    least = 1 if whole else rng.randint(1, 4)
    slots = least + rng.choice([0, 1, 5])
    kept_free = least if any(unit.streamed and unit.updater for unit in units) else 0
    return StreamPlan(units, slots, (rng.randint(1, 3), rng.randint(1, 4)), kept_free), pages


class Lanes:
    """Fake lanes over a fake SSD, whose pages have for each block the number of its updates. Work ends in any order."""

    def __init__(self, rng: Random, plan: StreamPlan, pages: list[list[tuple[int, int]]], fails: float = 0.0) -> None:
        self.rng, self.plan, self.pages, self.fails = rng, plan, pages, fails
        self.gives_up, self.repeatable = True, False
        self.stream = Stream(plan)
        self.pending: list[tuple[Do, Block, BaseException | None]] = []
        self.slots: list[dict[tuple[int, int, int], int]] = [{} for _ in range(plan.slots)]
        """By slot, (unit, page, block) -> updates of the block, as far as they are in the page."""
        self.ssd = {
            (unit, page, block): 0
            for unit, blocks in enumerate(pages)
            for block, (first, last) in enumerate(blocks)
            for page in range(first, last + 1)
        }
        self.home = {(unit, block): 0 for unit, blocks in enumerate(pages) for block in range(len(blocks))}
        """(unit, block) -> updates so far, for units that are not streamed."""
        self.reads: dict[int, list[int]] = {}
        """unit -> the blocks that were read since its last update was asked for or it was read ahead."""
        self.asked: list[Asked] = []

    # --- what is asked for ---

    def ask(self, unit: int, blocks: list[int]) -> Asked:
        self.asked.append(update := Asked(unit, blocks))
        self.stream.ask(update, unit, blocks, self.repeatable or self.rng.random() < 0.5)
        self.collect()
        return update

    def read_ahead(self, unit: int) -> None:
        self.stream.read_ahead(unit)
        self.collect()

    # --- lanes ---

    def collect(self) -> None:
        for action in self.stream.take():
            if action.do is Do.SUSPEND:
                self.suspended(action.about)
                continue
            if action.do in (Do.USED, Do.END):
                self.note(action)
                continue
            block: Block = action.about
            of = self.plan.units[block.unit]
            assert (block.slot is not None) == of.streamed
            assert (block.place is not None) == (of.takes_place and action.do is Do.UPDATE)
            self.pending.append((action.do, block, RuntimeError() if self.rng.random() < self.fails else None))
        slots = [block.slot for _, block, _ in self.pending if block.slot is not None]
        assert len(slots) == len(set(slots)), "a slot has one owner"
        assert set(slots) <= set(range(self.plan.slots))
        for updater in (0, 1):
            mine = [block for _, block, _ in self.pending if self.plan.units[block.unit].updater == updater]
            places = [block.place for block in mine if block.place is not None]
            assert len(places) == len(set(places))
            assert set(places) <= set(range(self.plan.places[updater]))

    def suspended(self, update: Asked) -> None:
        assert not [block for _, block, _ in self.pending if block.update is update]
        if self.gives_up and self.rng.random() < 0.5 * self.fails:
            self.stream.give_up(update)
        else:
            self.stream.try_again()
        self.collect()

    def note(self, action: Action) -> None:
        update: Asked = action.about
        assert update.said == ([] if action.do is Do.USED else [Do.USED])
        update.said.append(action.do)
        update.error = action.error
        under_way = [do for do, block, _ in self.pending if block.update is update]
        assert Do.UPDATE not in under_way
        if action.do is Do.END:
            assert not under_way
        if action.error is None:
            assert sorted(update.updated) == update.blocks, "each block once"

    def end_one(self, only: int | None = None) -> bool:
        """End some work, of one updater; False if there is none."""
        able = [each for each in self.pending if only is None or self.plan.units[each[1].unit].updater == only]
        if not able:
            return False
        do, block, error = ended = self.rng.choice(able)
        self.pending.remove(ended)
        if error is None:
            self.carry_out(do, block)
        elif do is Do.UPDATE and block.slot is not None:  # in which it has changed something
            self.slots[block.slot] = dict.fromkeys(self.slots[block.slot], -1)
        {Do.READ: self.stream.has_read, Do.UPDATE: self.stream.has_updated, Do.WRITE: self.stream.has_written}[do](
            block, error
        )
        self.collect()
        return True

    def carry_out(self, do: Do, block: Block) -> None:
        unit, index, slot = block.unit, block.index, block.slot
        first, last = self.pages[unit][index]
        if slot is None:
            assert do is Do.UPDATE
            self.home[unit, index] += 1
        elif do is Do.READ:
            self.slots[slot] = {at: n for at, n in self.ssd.items() if at[0] == unit and first <= at[1] <= last}
        elif do is Do.UPDATE:
            mine = [at for at in self.slots[slot] if at[0] == unit and at[2] == index]
            assert mine, "its states are in its slot"
            for at in mine:
                self.slots[slot][at] += 1
        else:
            assert any(at[0] == unit and at[2] == index for at in self.slots[slot])
            self.ssd |= self.slots[slot]
        if do is Do.UPDATE:
            block.update.updated.append(index)

    def finish(self) -> None:
        while self.end_one():
            pass
        assert all(update.said == [Do.USED, Do.END] for update in self.asked), "everything ends"

    def check(self) -> None:
        """Every update has changed its blocks, in the pages of all of them."""
        for unit, blocks in enumerate(self.pages):
            for block in range(len(blocks)):
                due = sum(block in update.blocks for update in self.asked if update.unit == unit)
                found = {n for at, n in self.ssd.items() if at[0] == unit and at[2] == block}
                streamed = self.plan.units[unit].streamed
                assert found == {due} if streamed else self.home[unit, block] == due

    def check_all_is_free(self) -> None:
        self.stream.drop_ahead()
        self.collect()
        assert self.stream.idle
        assert not self.pending
        assert sorted(self.stream._free) == list(range(self.plan.slots))
        free = [sorted(updater.places) for updater in self.stream._updaters]
        assert free == [list(range(places)) for places in self.plan.places]


def play(rng: Random, lanes: Lanes) -> None:
    """Ask for updates and for reading ahead, while work ends. A unit has one update at a time."""
    for _ in range(rng.randint(1, 30)):
        what = rng.random()
        unit = rng.randrange(UNITS)
        busy = any(update.unit == unit and Do.END not in update.said for update in lanes.asked)
        if what < 0.3 and not busy:
            count = len(lanes.pages[unit])
            lanes.ask(unit, [block for block in range(count) if rng.random() < rng.choice([0.6, 1.0])])
        elif what < 0.45 and not busy and lanes.plan.units[unit].streamed:
            lanes.read_ahead(unit)
        elif what < 0.5:
            lanes.stream.drop_ahead()
            lanes.collect()
        else:
            lanes.end_one()


@settings(max_examples=300)
@given(SEEDS)
def test_each_block_of_an_update_is_updated_once_from_the_latest_pages(seed: int) -> None:
    rng = Random(seed)
    lanes = Lanes(rng, *some_plan(rng))
    play(rng, lanes)
    lanes.finish()
    lanes.check()
    lanes.check_all_is_free()


@settings(max_examples=200)
@given(SEEDS, st.floats(0.02, 1.0))
def test_everything_ends_if_work_fails(seed: int, fails: float) -> None:
    rng = Random(seed)
    lanes = Lanes(rng, *some_plan(rng), fails)
    play(rng, lanes)
    lanes.finish()
    lanes.check_all_is_free()


@settings(max_examples=200)
@given(SEEDS, st.floats(0.02, 0.5))
def test_repeatable_updates_are_whole_whatever_fails(seed: int, fails: float) -> None:
    rng = Random(seed)
    lanes = Lanes(rng, *some_plan(rng), fails)
    lanes.gives_up, lanes.repeatable = False, True
    play(rng, lanes)
    lanes.finish()
    lanes.check()
    lanes.check_all_is_free()


@settings(max_examples=100)
@given(SEEDS)
def test_an_update_that_has_not_begun_can_be_refused(seed: int) -> None:
    rng = Random(seed)
    lanes = Lanes(rng, *some_plan(rng))
    play(rng, lanes)
    lanes.stream.refuse(KeyError())
    lanes.collect()
    lanes.finish()
    assert not any(update.updated for update in lanes.asked if type(update.error) is KeyError)
    lanes.check_all_is_free()


def test_of_updates_that_wait_for_slots_those_that_have_not_begun_are_refused() -> None:
    stream = Stream(StreamPlan([blocks(3), blocks(3)], 2, (1, 1)))
    stream.ask("first", 0, range(3))
    stream.ask("second", 1, range(3))
    stream.take()
    stream.refuse(KeyError())
    assert [(do, update) for do, update, _ in stream.take()] == [(Do.USED, "second"), (Do.END, "second")]


# --- the order ---------------------------------------------------------------------------------------------


def blocks(count: int, updater: int = 0, streamed: bool = True, takes_place: bool = False) -> UnitBlocks:
    return UnitBlocks([(n, n + 1) for n in range(count)], updater, streamed, takes_place)


def begun(stream: Stream) -> list[tuple[Do, int, int]]:
    """(action, unit, block) of each action since the last call."""
    return [(do, about.unit, about.index) for do, about, _ in stream.take() if isinstance(about, Block)]


def test_blocks_begin_in_the_order_of_pages_and_updates_in_the_order_in_which_they_were_asked_for() -> None:
    stream = Stream(StreamPlan([blocks(3), blocks(2)], 2, (1, 1)))
    stream.ask("first", 0, range(3))
    stream.ask("second", 1, range(2))
    order, under_way = [], stream.take()
    while under_way:
        do, block, _ = under_way.pop(0)
        if do is Do.READ:
            order.append((block.unit, block.index))
            stream.has_read(block, None)
        elif do is Do.UPDATE:
            stream.has_updated(block, None)
        elif do is Do.WRITE:
            stream.has_written(block, None)
        under_way += stream.take()
    assert order == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_what_was_read_ahead_is_used_by_its_update_at_once_and_dropped_by_another() -> None:
    for asked in (0, 1):
        stream = Stream(StreamPlan([blocks(2), blocks(2)], 3, (1, 1)))
        stream.read_ahead(0)
        for action in stream.take():
            stream.has_read(action.about, None)
        assert not stream.take()
        stream.ask("it", asked, range(2))
        do = Do.READ if asked else Do.UPDATE
        assert begun(stream) == [(do, asked, 0), (do, asked, 1)]


def test_a_read_ahead_that_failed_is_read_again_by_the_update() -> None:
    stream = Stream(StreamPlan([blocks(1)], 1, (1, 1)))
    stream.read_ahead(0)
    (action,) = stream.take()
    stream.has_read(action.about, RuntimeError())
    stream.ask("it", 0, range(1))
    assert begun(stream) == [(Do.READ, 0, 0)]


def test_while_an_update_needs_slots_nothing_is_read_ahead() -> None:
    stream = Stream(StreamPlan([blocks(5), blocks(5)], 2, (1, 1)))
    stream.ask("it", 0, range(5))
    (first, _) = stream.take()
    stream.read_ahead(1)
    assert not stream.take()
    stream.has_read(first.about, None)
    (update,) = stream.take()
    stream.has_updated(update.about, None)
    (write,) = stream.take()
    stream.has_written(write.about, None)
    assert begun(stream) == [(Do.READ, 0, 2)]


def test_nothing_is_read_ahead_while_an_update_waits_for_a_page() -> None:
    shared = blocks(3)._replace(after={1: (0,)})
    stream = Stream(StreamPlan([shared, blocks(3)], 3, (1, 1)))
    stream.ask("it", 0, range(3))
    stream.read_ahead(1)
    assert begun(stream) == [(Do.READ, 0, 0)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_updater_never_waits_for_what_the_other_has_read_ahead(ahead: int) -> None:
    """All of the other's reads are stuck."""
    plan = StreamPlan([blocks(9, 0), blocks(9, 1, takes_place=True)], 6, (1, 4), kept_free=4)
    lanes = Lanes(Random(0), plan, [[(n, n) for n in range(9)]] * 2)
    lanes.read_ahead(ahead)
    assert 0 < len(lanes.pending) <= 2
    update = lanes.ask(1 - ahead, [*range(9)])
    while lanes.end_one(only=1 - ahead):
        pass
    assert update.said == [Do.USED, Do.END]


def test_two_updaters_share_the_slots_evenly() -> None:
    stream = Stream(StreamPlan([blocks(9, 0), blocks(9, 1)], 4, (1, 1)))
    stream.ask("first", 0, range(9))
    under_way = [action.about for action in stream.take()]
    stream.ask("second", 1, range(9))
    for block in under_way[:2]:  # the first one's end
        stream.has_read(block, None)
        stream.has_updated(block, None)
        stream.has_written(block, None)
    assert begun(stream)[-1][1] == 1
    assert {updater.held for updater in stream._updaters} == {2}


def test_small_updates_overtake_those_that_wait_for_a_place() -> None:
    stream = Stream(StreamPlan([blocks(9, streamed=False, takes_place=True), blocks(2, streamed=False)], 0, (2, 0)))
    stream.ask("large", 0, range(9))
    assert begun(stream) == [(Do.UPDATE, 0, 0), (Do.UPDATE, 0, 1)]
    stream.ask("small", 1, range(2))
    assert begun(stream) == [(Do.UPDATE, 1, 0), (Do.UPDATE, 1, 1)]


def test_after_an_error_no_block_of_the_update_begins() -> None:
    stream = Stream(StreamPlan([blocks(9)], 3, (1, 1)))
    stream.ask("it", 0, range(9))
    first, second, third = (action.about for action in stream.take())
    stream.has_read(first, None)
    stream.has_read(second, None)
    assert begun(stream) == [(Do.UPDATE, 0, 0), (Do.UPDATE, 0, 1)]
    stream.has_updated(second, RuntimeError("of the kernel"))
    stream.has_read(third, None)
    assert begun(stream) == []
    stream.has_updated(first, None)
    said = [(do, str(error)) for do, _, error in stream.take()]
    assert said == [(Do.USED, "of the kernel"), (Do.END, "of the kernel")]


def test_transfers_that_fail_are_tried_again_and_meanwhile_no_block_of_the_update_begins() -> None:
    stream = Stream(StreamPlan([blocks(4)], 2, (1, 1)))
    stream.ask("it", 0, range(4))
    first, second = (action.about for action in stream.take())
    stream.has_read(second, OSError("read"))
    stream.has_read(first, None)
    assert begun(stream) == [(Do.UPDATE, 0, 0)]
    stream.has_updated(first, None)
    assert begun(stream) == [(Do.WRITE, 0, 0)]
    stream.has_written(first, OSError("write"))
    (said,) = stream.take()
    assert (said.do, said.about, str(said.error)) == (Do.SUSPEND, "it", "read")
    stream.try_again()
    assert sorted(begun(stream), key=str) == [(Do.READ, 0, 1), (Do.WRITE, 0, 0)]
    stream.has_written(first, None)
    (read,) = stream.take()
    assert (read.do, read.about.index) == (Do.READ, 2)
    stream.has_read(second, OSError("again"))
    stream.has_read(read.about, None)
    stream.has_updated(read.about, None)
    assert begun(stream) == [(Do.UPDATE, 0, 2), (Do.WRITE, 0, 2)]
    stream.has_written(read.about, None)
    assert [action.do for action in stream.take()] == [Do.SUSPEND]
    stream.give_up("another")
    assert stream.take() == []


def test_blocks_that_wait_for_a_place_do_not_begin_after_an_error() -> None:
    stream = Stream(StreamPlan([blocks(3, takes_place=True)], 3, (1, 1)))
    stream.ask("it", 0, range(3))
    read = [action.about for action in stream.take()]
    for block in read:
        stream.has_read(block, None)
    assert begun(stream) == [(Do.UPDATE, 0, 0)]
    stream.has_updated(read[0], RuntimeError())
    assert [do for do, *_ in stream.take()] == [Do.USED, Do.END]
    assert stream.idle


def test_a_long_ring_is_read_a_few_blocks_at_a_time() -> None:
    """So whoever asks for an update starts little."""
    stream = Stream(StreamPlan([blocks(500)], 500, (1, 1)))
    stream.ask("it", 0, range(500))
    reads = stream.take()
    assert len(reads) < 30
    stream.has_read(reads[0].about, None)
    assert begun(stream) == [(Do.UPDATE, 0, 0), (Do.READ, 0, len(reads))]


def test_coarse_blocks_are_neighbouring_blocks_as_one_in_as_much_fewer_slots() -> None:
    unit = UnitBlocks([(0, 4), (4, 9), (9, 10), (10, 12), (12, 13)], 0, True, False, {1: (0,), 3: (1, 2), 4: (3,)})
    plan = StreamPlan([unit], 40, (4, 8), 4).coarse(2)
    assert plan.units[0].bounds == [(0, 9), (9, 12), (12, 13)]
    assert {block: earlier for block, earlier in plan.units[0].after.items() if earlier} == {1: (0,), 2: (1,)}
    assert (plan.slots, plan.places, plan.kept_free) == (20, (3, 4), 2)
    assert StreamPlan([unit], 2, (1, 2), 0).coarse(8)[1:] == (2, (1, 2), 0), "a rule of whole parameters"
