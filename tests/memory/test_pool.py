"""The pool against a naive model that keeps one owner per frame."""

import copy
from itertools import groupby

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.memory.page import PageRun
from pagoda.memory.pool import PagePool, Window


def brute_force_window(owners: list[PageRun | None], first: int, count: int, offered: list[PageRun]) -> list[PageRun]:
    """Tries every window of free and offered frames; the cheapest by frames to free, then the lowest address. Empty if
    there is none."""
    found = []
    for start in range(len(owners) - count + 1):
        runs = list(dict.fromkeys(run for run in owners[start : start + count] if run is not None))
        if set(runs) <= set(offered):
            found.append((sum(run.count for run in runs), start, runs))
    return min(found)[2] if found else []


class PoolAgainstModel(RuleBasedStateMachine):
    """Promises of PagePool, each checked by what a list of owners says."""

    @initialize(frames=st.integers(1, 24), first=st.integers(0, 5))
    def start(self, frames: int, first: int) -> None:
        self.pool = PagePool(frames, first)
        self.first = first
        self.owners: list[PageRun | None] = [None] * frames

    def runs(self) -> list[PageRun]:
        return list(dict.fromkeys(run for run in self.owners if run is not None))

    def holes(self) -> list[tuple[int, int]]:
        """(length, start) of each maximal stretch of free frames."""
        found = []
        for is_free, group in groupby(enumerate(self.owners, self.first), key=lambda pair: pair[1] is None):
            frames = list(group)
            if is_free:
                found.append((len(frames), frames[0][0]))
        return found

    @rule(count=st.integers(1, 8))
    def alloc_takes_the_best_fit_at_the_lowest_address(self, count: int) -> None:
        fits = [hole for hole in self.holes() if hole[0] >= count]
        run = self.pool.alloc(count)
        assert run == (PageRun(min(fits)[1], count) if fits else None)
        if run is not None:
            mine = slice(run.start - self.first, run.stop - self.first)
            assert self.owners[mine] == [None] * count
            self.owners[mine] = [run] * count

    @precondition(lambda self: self.runs())
    @rule(data=st.data())
    def free_gives_the_frames_back(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs()))
        self.pool.free(run)
        self.owners = [None if owner == run else owner for owner in self.owners]

    @rule(start=st.integers(0, 30), count=st.integers(1, 8))
    def freeing_anything_else_is_refused_and_changes_nothing(self, start: int, count: int) -> None:
        run = PageRun(start, count)
        if run not in self.runs():
            with pytest.raises(ValueError, match=rf"start={start}, count={count}"):
                self.pool.free(run)

    @rule(count=st.integers(1, 26), data=st.data())
    def a_window_needs_the_fewest_offers_and_frees_the_fewest_frames(self, count: int, data: st.DataObject) -> None:
        if self.pool.largest_free >= count:
            return
        window, offered = Window(self.pool, count), []
        for run in data.draw(st.permutations(self.runs())):
            offered.append(run)
            freed = window.offer(run)
            assert (freed or []) == brute_force_window(self.owners, self.first, count, offered)
            if freed:
                after = copy.deepcopy(self.pool)
                for each in freed:
                    after.free(each)
                assert after.alloc(count) is not None
                return
        assert count > len(self.owners)

    @invariant()
    def counters_say_what_the_owners_say(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.largest_free == max((length for length, _ in self.holes()), default=0)
        tiles = self.pool.tiles(self.first, self.first + len(self.owners))
        assert [run for run, is_free in tiles if not is_free] == self.runs()


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
