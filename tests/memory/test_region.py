"""A region's runs show their own bytes and no others, each time through a storage of their own."""

import pytest
import torch

from pagoda.memory import FRESH_USE_COUNT, Arena, MemoryTier, Run, storage_use_count
from pagoda.memory.region import Region

PAGE = 4096
FIRST, SECOND = Run(0, 2), Run(2, 2)


def region(poison: bool = False) -> tuple[MemoryTier, Region]:
    """Four pages behind one that belongs to somebody else."""
    tier = MemoryTier("host", Arena(5 * PAGE), PAGE, poison=poison)
    tier.alloc(1)
    return tier, Region(tier, 4)


def test_a_region_takes_its_pages_once() -> None:
    tier, leases = region()
    leases.tensor(FIRST, torch.uint8, PAGE)
    assert tier.in_use_bytes == 5 * PAGE


def test_each_tensor_of_a_run_has_a_storage_of_its_own() -> None:
    _, leases = region()
    one, two = leases.tensor(FIRST, torch.float32, 8), leases.tensor(FIRST, torch.float32, 8)
    one.fill_(3.0)
    assert two.tolist() == [3.0] * 8
    held = one[2:4]
    assert storage_use_count(one) == FRESH_USE_COUNT + 1
    assert storage_use_count(two) == FRESH_USE_COUNT
    del held
    assert storage_use_count(one) == FRESH_USE_COUNT


def test_views_and_tensors_of_a_run_show_the_same_bytes_and_no_others() -> None:
    tier, leases = region()
    for run, value in ((FIRST, 1), (SECOND, 2)):
        leases.view(run)[:] = bytes([value]) * 2 * PAGE
    for run, value in ((FIRST, 1), (SECOND, 2)):
        assert leases.tensor(run, torch.uint8, 2 * PAGE).eq(value).all()
    assert tier.arena.tensor(0, PAGE, torch.uint8).eq(0).all()


@pytest.mark.parametrize("poison", [True, False])
def test_poisoned_frames_are_nan_in_debug_mode_and_their_neighbours_are_not(poison: bool) -> None:
    _, leases = region(poison=poison)
    stays, ends = (leases.tensor(run, torch.float32, run.count * PAGE // 4) for run in (FIRST, SECOND))
    stays.fill_(1.0)
    ends.fill_(2.0)
    leases.poison(SECOND)
    assert stays.eq(1.0).all()
    assert ends.isnan().all().item() is poison
    assert ends.eq(2.0).all().item() is not poison
