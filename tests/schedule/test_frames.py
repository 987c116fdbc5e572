"""Frames keep every lease contiguous and make sure that pinned ones never block all the others."""

import copy
import math
from itertools import groupby

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.memory.page import Run
from pagoda.schedule.frames import Frames


class FramesAgainstModel(RuleBasedStateMachine):
    """Promises of Frames, each checked by a list with the owner of each frame."""

    @initialize(slab=st.integers(1, 6), slabs=st.integers(1, 4), rest=st.integers(0, 5))
    def start(self, slab: int, slabs: int, rest: int) -> None:
        self.slab = slab
        self.owners: list[Run | None] = [None] * (slab * slabs + rest % slab)
        self.frames = Frames(len(self.owners), slab)
        self.peak = 0

    def runs(self) -> list[Run]:
        return list(dict.fromkeys(run for run in self.owners if run is not None))

    def slabs(self) -> list[list[Run | None]]:
        return [self.owners[first : first + self.slab] for first in range(0, len(self.owners), self.slab)]

    def longest_hole(self, slab: list[Run | None]) -> int:
        return max((len([*group]) for owner, group in groupby(slab) if owner is None), default=0)

    @rule(data=st.data())
    def alloc_takes_free_frames_of_the_slab_with_the_least_room_that_has_them(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.slab + 1))
        fitting = [room for slab in self.slabs() if (room := self.longest_hole(slab)) >= count]
        run = self.frames.alloc(count)
        assert (run is None) == (not fitting)
        if run is None:
            return
        assert run.count == count
        assert run.start // self.slab == (run.stop - 1) // self.slab, "a run never straddles two slabs"
        assert self.owners[run.start : run.stop] == [None] * count
        assert self.longest_hole(self.slabs()[run.start // self.slab]) == min(fitting)
        self.owners[run.start : run.stop] = [run] * count
        self.peak = max(self.peak, len(self.owners) - self.owners.count(None))

    @precondition(lambda self: self.runs())
    @rule(data=st.data())
    def free_gives_the_frames_back(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs()))
        self.frames.free(run)
        self.owners = [None if owner == run else owner for owner in self.owners]

    @precondition(lambda self: self.runs())
    @rule(data=st.data())
    def freeing_a_window_makes_room_in_its_slab_at_the_least_highest_price(self, data: st.DataObject) -> None:
        near, count = data.draw(st.sampled_from(self.runs())), data.draw(st.integers(1, self.slab))
        price = st.none() | st.sampled_from([-math.inf, -2.0, 0.0, 1.0])
        prices = {run: data.draw(price) for run in self.runs()}
        window = self.frames.window(near, count, lambda run: prices[run])
        slab = self.slabs()[near.start // self.slab]
        costs = []
        for first in range(len(slab) - count + 1):
            inside = {run for run in slab[first : first + count] if run is not None}
            if all(prices[run] is not None for run in inside):
                costs.append(max((prices[run] for run in inside), default=-math.inf))
        if window is None:
            assert not costs
            return
        assert max((prices[run] for run in window), default=-math.inf) == min(costs)
        after = copy.deepcopy(self.frames)
        for run in window:
            assert prices[run] is not None
            after.free(run)
        assert after.alloc(count) is not None

    @rule(data=st.data())
    def pinned_runs_block_only_the_slabs_they_touch(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sets(st.sampled_from(self.runs()))) if self.runs() else set()
        touched = {run.start // self.slab for run in pinned}
        for near in self.runs():
            window = self.frames.window(near, self.slab, lambda run: None if run in pinned else 0.0)
            whole = near.start // self.slab < len(self.owners) // self.slab
            assert (window is not None) == (whole and near.start // self.slab not in touched)

    @invariant()
    def counters_say_what_the_owners_say(self) -> None:
        if hasattr(self, "frames"):
            assert self.frames.in_use == len(self.owners) - self.owners.count(None)
            assert self.frames.peak == self.peak


TestFramesAgainstModel = FramesAgainstModel.TestCase
TestFramesAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
