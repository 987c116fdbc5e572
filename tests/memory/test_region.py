"""A region's pages show their own bytes and no others, each time through a storage of their own."""

import pytest
import torch

from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.page import Run
from pagoda.memory.region import Region

PAGE = 4096
FIRST, SECOND = Run(0, 2), Run(2, 2)


def leased(poison: bool = False) -> tuple[Arena, Region]:
    """Four pages behind one that belongs to somebody else."""
    arena = Arena(5 * PAGE)
    host = Region.of("host", arena, PAGE, poison=poison)
    host.take(1)
    return arena, host.take(4)


def test_pages_are_taken_once_and_no_more_than_there_are() -> None:
    host = Region.of("host", Arena(5 * PAGE), PAGE)
    taken = [host.take(count) for count in (1, 3)]
    for value, pages in enumerate(taken, 1):
        pages.view()[:] = bytes([value]) * pages.nbytes
    assert [pages.nbytes for pages in taken] == [PAGE, 3 * PAGE]
    assert [set(pages.view()) for pages in taken] == [{1}, {2}]
    with pytest.raises(ValueError, match=r"Run\(start=4, count=2\) of 5 pages in tier 'host'"):
        host.take(2)


def test_bytes_beyond_the_last_whole_page_are_no_page() -> None:
    assert Region.of("host", Arena(3 * PAGE - 1), PAGE).count == 2


def test_each_tensor_of_a_run_has_a_storage_of_its_own() -> None:
    arena, leases = leased()
    one, two = (leases.part(SECOND).tensor(torch.float32, 8, 64) for _ in range(2))
    one.fill_(3.0)
    assert two.tolist() == [3.0] * 8
    assert one.data_ptr() == arena.address + 3 * PAGE + 64
    held = one[2:4]
    assert storage_use_count(one) == FRESH_USE_COUNT + 1
    assert storage_use_count(two) == FRESH_USE_COUNT
    del held
    assert storage_use_count(one) == FRESH_USE_COUNT


def test_views_and_tensors_of_a_run_show_the_same_bytes_and_no_others() -> None:
    arena, leases = leased()
    for run, value in ((FIRST, 1), (SECOND, 2)):
        leases.part(run).view()[:] = bytes([value]) * 2 * PAGE
    for run, value in ((FIRST, 1), (SECOND, 2)):
        assert leases.part(run).tensor(torch.uint8, 2 * PAGE).eq(value).all()
        assert leases.part(run).view(PAGE, 64) == bytes([value]) * 64
    assert arena.tensor(0, PAGE, torch.uint8).eq(0).all()


@pytest.mark.parametrize(("offset", "nbytes"), [(-64, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 64)])
def test_bytes_outside_a_run_are_refused_although_the_arena_has_them(offset: int, nbytes: int) -> None:
    _, leases = leased()
    with pytest.raises(ValueError, match=rf"of {2 * PAGE} bytes in tier 'host'"):
        leases.part(FIRST).view(offset, nbytes)
    with pytest.raises(ValueError, match=rf"of {2 * PAGE} bytes in tier 'host'"):
        leases.part(FIRST).tensor(torch.uint8, nbytes, offset)


@pytest.mark.parametrize("run", [Run(-1, 2), Run(3, 2)])
def test_pages_outside_a_region_are_refused_although_the_arena_has_them(run: Run) -> None:
    _, leases = leased()
    with pytest.raises(ValueError, match=r"of 4 pages in tier 'host'"):
        leases.part(run)


@pytest.mark.parametrize("poison", [True, False])
def test_poisoned_pages_are_nan_in_debug_mode_and_their_neighbours_are_not(poison: bool) -> None:
    _, leases = leased(poison)
    stays, ends = (leases.part(run).tensor(torch.float32, run.count * PAGE // 4) for run in (FIRST, SECOND))
    assert ends.isnan().all().item() is poison
    stays.fill_(1.0)
    ends.fill_(2.0)
    leases.part(SECOND).poison()
    assert stays.eq(1.0).all()
    assert ends.isnan().all().item() is poison
    assert ends.eq(2.0).all().item() is not poison
