"""Slabs keep every lease contiguous and make sure that pinned ones never block all the others."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda.memory import FRESH_USE_COUNT, Arena, MemoryTier, Run, storage_use_count
from pagoda.memory.slabs import SlabPool, SlabRegion

PAGE = 4096


class SlabsAgainstModel(RuleBasedStateMachine):
    """Promises of SlabPool, each checked by a list with the owner of each frame."""

    @initialize(slab=st.integers(1, 6), slabs=st.integers(1, 4), rest=st.integers(0, 5))
    def start(self, slab: int, slabs: int, rest: int) -> None:
        self.slab = slab
        self.pool = SlabPool(slab * slabs + rest % slab, slab)
        self.owners: list[Run | None] = [None] * self.pool.frames
        self.peak = 0

    def runs(self) -> list[Run]:
        return list(dict.fromkeys(run for run in self.owners if run is not None))

    def slabs(self) -> list[list[Run | None]]:
        return [self.owners[first : first + self.slab] for first in range(0, len(self.owners), self.slab)]

    def longest_hole(self, slab: list[Run | None]) -> int:
        length = longest = 0
        for owner in slab:
            length = length + 1 if owner is None else 0
            longest = max(longest, length)
        return longest

    @rule(data=st.data())
    def alloc_takes_free_frames_of_one_slab_the_fullest_that_has_them(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.slab))
        fitting = [slab for slab in self.slabs() if self.longest_hole(slab) >= count]
        run = self.pool.alloc(count)
        assert (run is None) == (not fitting)
        if run is None:
            return
        assert run.count == count
        assert run.start // self.slab == (run.stop - 1) // self.slab, "a run never straddles two slabs"
        assert self.owners[run.start : run.stop] == [None] * count
        chosen = self.slabs()[run.start // self.slab]
        assert chosen.count(None) == min(slab.count(None) for slab in fitting)
        self.owners[run.start : run.stop] = [run] * count
        self.peak = max(self.peak, len(self.owners) - self.owners.count(None))

    @precondition(lambda self: self.runs())
    @rule(data=st.data())
    def free_gives_the_frames_back(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs()))
        self.pool.free(run)
        self.owners = [None if owner == run else owner for owner in self.owners]

    @rule(data=st.data())
    def freeing_the_cheapest_window_makes_room_at_the_least_highest_price(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.slab))
        price = st.none() | st.sampled_from([-math.inf, -2.0, 0.0, 1.0])
        prices = {run: data.draw(price) for run in self.runs()}
        window = self.pool.cheapest_window(count, lambda run: prices[run])
        costs = []
        for first in range(len(self.owners) - count + 1):
            if first // self.slab == (first + count - 1) // self.slab:
                inside = {run for run in self.owners[first : first + count] if run is not None}
                if all(prices[run] is not None for run in inside):
                    costs.append(max((prices[run] for run in inside), default=-math.inf))
        if window is None:
            assert not costs
            return
        assert max((prices[run] for run in window), default=-math.inf) == min(costs)
        after = copy.deepcopy(self.pool)
        for run in window:
            assert prices[run] is not None
            after.free(run)
        assert after.alloc(count) is not None

    @rule(data=st.data())
    def pinned_runs_block_only_the_slabs_they_touch(self, data: st.DataObject) -> None:
        pinned = data.draw(st.sets(st.sampled_from(self.runs()))) if self.runs() else set()
        touched = {run.start // self.slab for run in pinned}
        whole = self.pool.frames // self.slab
        window = self.pool.cheapest_window(self.slab, lambda run: None if run in pinned else 0.0)
        assert (window is not None) == any(index not in touched for index in range(whole))

    @invariant()
    def counters_say_what_the_owners_say(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.in_use == len(self.owners) - self.owners.count(None)
            assert self.pool.peak == self.peak


TestSlabsAgainstModel = SlabsAgainstModel.TestCase
TestSlabsAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(-2, 6), st.integers(-2, 6))
def test_memory_that_cannot_hold_one_slab_is_refused(frames: int, slab: int) -> None:
    if slab > 0 and frames >= slab:
        assert SlabPool(frames, slab).alloc(slab) == Run(0, slab)
    else:
        with pytest.raises(ValueError, match=f"{frames} frames cannot hold a slab of {slab}"):
            SlabPool(frames, slab)


def test_a_run_longer_than_a_slab_is_never_given() -> None:
    pool = SlabPool(8, 4)
    assert pool.alloc(5) is None
    assert pool.cheapest_window(5, lambda _: 0.0) is None


def test_freeing_what_is_not_allocated_is_refused_and_changes_nothing() -> None:
    pool = SlabPool(8, 4)
    run = pool.alloc(3)
    assert run is not None
    with pytest.raises(ValueError, match="not allocated"):
        pool.free(Run(run.start, 2))
    assert pool.in_use == 3


def region(pages: int, slab: int, poison: bool = False) -> tuple[MemoryTier, SlabRegion]:
    """A region behind one page that belongs to somebody else."""
    tier = MemoryTier("host", Arena((pages + 1) * PAGE), PAGE, poison=poison)
    tier.alloc(1)
    return tier, SlabRegion(tier, pages, slab)


def taken(owner: SlabRegion, count: int) -> Run:
    run = owner.pool.alloc(count)
    assert run is not None
    return run


def test_a_region_takes_its_quota_once_and_counts_its_own_peak() -> None:
    tier, leases = region(4, 2)
    assert tier.in_use_bytes == 5 * PAGE
    one, two = taken(leases, 2), taken(leases, 1)
    leases.free(one)
    leases.free(two)
    assert tier.in_use_bytes == 5 * PAGE
    assert leases.peak_bytes == 3 * PAGE


def test_each_lease_of_a_run_has_a_storage_of_its_own() -> None:
    _, leases = region(4, 2)
    run = taken(leases, 2)
    one, two = leases.tensor(run, torch.float32, 8), leases.tensor(run, torch.float32, 8)
    one.fill_(3.0)
    assert two.tolist() == [3.0] * 8
    held = one[2:4]
    assert storage_use_count(one) == FRESH_USE_COUNT + 1
    assert storage_use_count(two) == FRESH_USE_COUNT
    del held
    assert storage_use_count(one) == FRESH_USE_COUNT


def test_views_and_tensors_of_a_run_show_the_same_bytes_and_no_others() -> None:
    tier, leases = region(4, 2)
    first, second = taken(leases, 2), taken(leases, 2)
    for run, value in ((first, 1), (second, 2)):
        leases.view(run, 0, 2 * PAGE)[:] = bytes([value]) * 2 * PAGE
    leases.view(second, PAGE, 4)[:] = bytes([9]) * 4
    assert leases.tensor(first, torch.uint8, 2 * PAGE).eq(1).all()
    expected = torch.full((2 * PAGE,), 2, dtype=torch.uint8)
    expected[PAGE : PAGE + 4] = 9
    assert torch.equal(leases.tensor(second, torch.uint8, 2 * PAGE), expected)
    assert tier.arena.tensor(0, PAGE, torch.uint8).eq(0).all()


@pytest.mark.parametrize("poison", [True, False])
def test_freed_frames_are_nan_in_poison_mode_and_their_neighbours_are_not(poison: bool) -> None:
    _, leases = region(4, 2, poison=poison)
    kept, freed = taken(leases, 1), taken(leases, 2)
    stays, ends = (leases.tensor(run, torch.float32, run.count * PAGE // 4) for run in (kept, freed))
    stays.fill_(1.0)
    ends.fill_(2.0)
    leases.free(freed)
    assert stays.eq(1.0).all()
    assert ends.isnan().all().item() is poison
    assert ends.eq(2.0).all().item() is not poison
