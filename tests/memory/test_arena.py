"""An arena is exactly as large as asked, its regions show no other bytes, and each tensor tells who holds it."""

import errno
import gc
import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory import arena as module
from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.page import PAGE_ALIGN, PageRun
from pagoda.memory.region import Region

MIB = 2**20
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


def mappings() -> Iterator[dict[str, str]]:
    """Fields of every mapping of this process as the kernel lists them: sizes in KiB, "start" and "stop" in bytes."""
    fields: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if fields:
                yield fields
            fields = {"start": str(int(header[1], 16)), "stop": str(int(header[2], 16))}
        else:
            name, _, value = line.partition(":")
            fields[name] = value.removesuffix("kB").strip()
    yield fields


def mapping_at(address: int) -> dict[str, str] | None:
    """The mapping that holds `address`, None when nothing is mapped there."""
    return next((m for m in mappings() if int(m["start"]) <= address < int(m["stop"])), None)


def all_arenas(field: str) -> int:
    """Bytes of a field over all mappings that forks do not copy: the kernel joins arenas that happen to adjoin."""
    gc.collect()
    return sum(int(m[field]) for m in mappings() if "dc" in m["VmFlags"].split()) * 1024


@linux_only
def test_an_arena_says_what_of_it_is_in_ram_and_returns_a_part_without_the_rest() -> None:
    arena = Arena(64 * MIB)
    assert arena.resident_bytes == 0
    arena.tensor(0, 64 * MIB, torch.uint8).fill_(7)
    assert arena.resident_bytes == 64 * MIB
    arena.discard(16 * MIB, 32 * MIB)
    assert arena.resident_bytes == 32 * MIB
    arena.populate()
    sums = [int(arena.tensor(at * MIB, 16 * MIB, torch.uint8).sum()) >> 20 for at in (0, 16, 48)]
    assert sums == [7 * 16, 0, 7 * 16]


@linux_only
@pytest.mark.parametrize("nbytes", [1, 3 * MIB, 100 * MIB + 12_345])
def test_an_arena_maps_what_was_asked_and_no_more(nbytes: int) -> None:
    before = all_arenas("Size")
    arena = Arena(nbytes)
    assert arena.address % PAGE_ALIGN == 0
    assert arena.nbytes == nbytes
    assert nbytes <= all_arenas("Size") - before < nbytes + PAGE_ALIGN
    mapped = mapping_at(arena.address)
    assert "dc" in mapped["VmFlags"].split()  # "do not copy area on fork", proc(5)
    if nbytes > 16 * MIB:  # what was not touched is not resident, but for a huge page at each end
        before = all_arenas("Rss")
        arena.tensor(8 * MIB, 4 * MIB, torch.uint8).fill_(1)
        assert 4 <= (all_arenas("Rss") - before) / MIB <= 8


def test_tensors_over_the_same_bytes_share_memory_but_not_storage() -> None:
    arena = Arena(PAGE_ALIGN)
    one = arena.tensor(64, 8, torch.float32)
    two = arena.tensor(64, 8, torch.float32)
    one.fill_(3.0)
    assert two.tolist() == [3.0] * 8
    assert one.data_ptr() == two.data_ptr() == arena.address + 64
    assert arena.view(64, 8) == one[:2].view(torch.uint8).numpy().data
    assert storage_use_count(one) == storage_use_count(two) == FRESH_USE_COUNT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_poison_reads_as_nan_and_keeps_to_its_range(dtype: torch.dtype) -> None:
    arena = Arena(PAGE_ALIGN)
    arena.poison(64, 128)
    assert arena.tensor(64, 128 // dtype.itemsize, dtype).isnan().all()
    assert not arena.tensor(0, 64, torch.uint8).any()
    assert not arena.tensor(192, PAGE_ALIGN - 192, torch.uint8).any()


@linux_only
def test_close_keeps_memory_that_a_tensor_still_reads_and_returns_it_after() -> None:
    arena = Arena(MIB)
    address = arena.address
    lease = arena.tensor(0, 4, torch.float32)
    view = arena.view(0, 16)
    lease.fill_(5.0)
    arena.close()
    arena.close()
    assert lease.tolist() == [5.0] * 4
    del lease
    assert mapping_at(address) is not None
    view.release()
    del view
    assert mapping_at(address) is None


def test_each_live_holder_of_a_storage_adds_one_use_until_it_dies() -> None:
    lease = Arena(PAGE_ALIGN).tensor(0, 16, torch.float32)
    view, detached, parameter = lease[4:].view(3, 4), lease.detach(), torch.nn.Parameter(lease)
    same_object = lease
    assert storage_use_count(same_object) == FRESH_USE_COUNT + 3
    del view, detached, parameter
    assert storage_use_count(lease) == FRESH_USE_COUNT
    parameter = torch.nn.Parameter(torch.zeros(16))
    placeholder, parameter.data = parameter.data, lease.view(16)
    assert storage_use_count(lease) == FRESH_USE_COUNT + 1
    parameter.data = placeholder
    assert storage_use_count(lease) == FRESH_USE_COUNT


def test_a_view_saved_for_backward_is_counted_until_the_graph_is_gone_and_the_leases_own_tensor_is_not() -> None:
    # Why a lease hands out views only. Should torch ever count its own tensor, the rule can be dropped.
    lease = Arena(PAGE_ALIGN).tensor(0, 4, torch.float32)
    x = torch.ones(4, requires_grad=True)
    for uses in (1, 0):
        loss = (x * (lease.view(4) if uses else lease)).sum()
        assert storage_use_count(lease) == FRESH_USE_COUNT + uses
        loss.backward()
        assert storage_use_count(lease) == FRESH_USE_COUNT


@pytest.mark.parametrize(
    ("offset", "nbytes", "why"),
    [
        *((offset, nbytes, "arena of 100 bytes") for offset, nbytes in ((-4, 4), (0, 0), (0, 104), (100, 4), (96, 8))),
        (2, 4, "offset 2 is not a multiple"),
        (0, 4, "closed"),
    ],
)
def test_bytes_that_the_arena_has_not_are_refused(offset: int, nbytes: int, why: str) -> None:
    arena = Arena(100)
    if why == "closed":
        arena.close()
    with pytest.raises(ValueError, match=why):
        arena.tensor(offset, nbytes // 4, torch.float32)
    for refuse in (arena.view, arena.poison) if offset != 2 else ():
        with pytest.raises(ValueError, match=why):
            refuse(offset, nbytes)


@pytest.mark.parametrize(
    ("nbytes", "error", "why"),
    [(0, ConfigError, "at least 1 byte"), (2**60, BudgetError, "PiB"), (2**70, BudgetError, "PiB")],
)
def test_more_or_less_memory_than_the_system_maps_is_refused(nbytes: int, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Arena(nbytes)


@linux_only
@pytest.mark.parametrize("advice", [module._POPULATE_WRITE, 999], ids=["as it is", "an old kernel"])
def test_populating_takes_all_the_memory_at_once_and_leaves_it_zero(
    advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_POPULATE_WRITE", advice)
    monkeypatch.setattr(module, "_PIECE_BYTES", 4 * MIB)
    arena = Arena(33 * MIB + 123)
    before = all_arenas("Rss")
    arena.populate()
    assert all_arenas("Rss") - before >= 33 * MIB
    assert not arena.tensor(0, arena.nbytes, torch.uint8).any()


@pytest.fixture
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses every mapping for which it would have to reserve RAM."""
    mapped = mmap.mmap

    def map_unreserved(fileno: int, length: int, flags: int) -> mmap.mmap:
        if not flags & module._MAP_NORESERVE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapped(fileno, length, flags=flags)

    monkeypatch.setattr(mmap, "mmap", map_unreserved)
    monkeypatch.setattr(module, "_PIECE_BYTES", MIB)


@linux_only
@pytest.mark.usefixtures("_small_machine")
def test_an_arena_larger_than_ram_is_taken_as_the_machine_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([0, 0, *[2**40] * 100])
    monkeypatch.setattr(module, "free_ram", lambda: next(free))
    before = all_arenas("Rss")
    arena = Arena(33 * MIB)
    assert all_arenas("Rss") - before >= arena.nbytes == 33 * MIB


@pytest.mark.usefixtures("_small_machine")
def test_an_arena_larger_than_ram_is_refused_where_the_machine_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([2**40, *[MIB // 2] * 100])
    monkeypatch.setattr(module, "free_ram", lambda: next(free))
    monkeypatch.setattr(module, "_GROWTH_S", 0.1)
    with pytest.raises(BudgetError, match=r"33\.00 MiB .* more than this machine has.* 512\.00 KiB are free"):
        Arena(33 * MIB)


# --- regions ----------------------------------------------------------------------------------------------------

PAGE = 4096
FIRST, SECOND = PageRun(0, 2), PageRun(2, 2)


def leased(poison: bool = False) -> Region:
    """Four pages behind one that belongs to somebody else."""
    host = Region.of("host", Arena(6 * PAGE - 1), PAGE, poison=poison)
    assert host.count == 5
    host.take(1)
    return host.take(4)


def test_bytes_and_pages_outside_are_refused_although_the_arena_has_them() -> None:
    leases = leased()
    for offset, nbytes in ((-64, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 64)):
        with pytest.raises(ValueError, match=rf"inside the {2 * PAGE} bytes of tier 'host'"):
            leases.part(FIRST).view(offset, nbytes)
        with pytest.raises(ValueError, match=rf"inside the {2 * PAGE} bytes of tier 'host'"):
            leases.part(FIRST).tensor(torch.uint8, nbytes, offset)
    for run in (PageRun(-1, 2), PageRun(3, 2)):
        with pytest.raises(ValueError, match=r"inside the 4 pages of tier 'host'"):
            leases.part(run)


@pytest.mark.parametrize("poison", [True, False])
def test_poisoned_pages_are_nan_in_debug_mode_and_their_neighbours_are_not(poison: bool) -> None:
    leases = leased(poison)
    stays, ends = (leases.part(run).tensor(torch.float32, run.count * PAGE // 4) for run in (FIRST, SECOND))
    assert ends.isnan().all().item() is poison
    stays.fill_(1.0)
    ends.fill_(2.0)
    leases.part(SECOND).poison()
    assert stays.eq(1.0).all()
    assert ends.isnan().all().item() is poison
    assert ends.eq(2.0).all().item() is not poison
