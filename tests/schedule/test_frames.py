"""Frames keep every lease contiguous, and runs in use block only the slabs that they touch."""

import random

import pytest

from pagoda.memory.page import Run
from pagoda.schedule.frames import Frames

SLAB, SLABS = 6, 4


@pytest.mark.parametrize("seed", range(20))
def test_runs_never_overlap_and_whatever_is_pinned_every_other_slab_can_be_made_free(seed: int) -> None:
    rng = random.Random(seed)
    frames = Frames(SLAB * SLABS + seed % SLAB, SLAB)
    runs: list[Run] = []
    peak = 0
    for _ in range(200):
        if runs and rng.random() < 0.4:
            frames.free(runs.pop(rng.randrange(len(runs))))
        elif (run := frames.alloc(rng.randint(1, SLAB))) is not None:
            assert run.start // SLAB == (run.stop - 1) // SLAB, "a run never straddles two slabs"
            assert all(run.stop <= other.start or other.stop <= run.start for other in runs)
            runs.append(run)
        in_use = sum(run.count for run in runs)
        peak = max(peak, in_use)
        assert (frames.in_use, frames.peak) == (in_use, peak)
        prices = {run: rng.choice([None, 0.0, 1.0]) for run in runs}
        touched = {run.start // SLAB for run, price in prices.items() if price is None}
        for near in runs:
            slab = near.start // SLAB
            assert (frames.window(near, SLAB, prices.get) is not None) == (slab < SLABS and slab not in touched)


def test_the_slab_with_the_least_room_that_has_it_gives_a_run() -> None:
    frames = Frames(12, 6)
    first = frames.alloc(4)
    assert first is not None
    assert frames.alloc(2) == Run(first.stop, 2)
    assert frames.alloc(7) is None
