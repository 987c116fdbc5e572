"""An arena is exactly as large as asked, and each tensor over it tells who holds it."""

import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.page import PAGE_ALIGN

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
@pytest.mark.parametrize("nbytes", [1, 3 * MIB, 100 * MIB + 12_345])
def test_an_arena_maps_what_was_asked_and_no_more(nbytes: int) -> None:
    before = all_arenas("Size")
    arena = Arena(nbytes)
    assert arena.address % PAGE_ALIGN == 0
    assert arena.nbytes == nbytes
    assert nbytes <= all_arenas("Size") - before < nbytes + PAGE_ALIGN


@linux_only
def test_memory_that_was_not_touched_is_not_resident() -> None:
    before = all_arenas("Rss")
    arena = Arena(512 * MIB)
    arena.tensor(8 * MIB, 4 * MIB, torch.uint8).fill_(1)
    # At most one huge page more at each end, where the mapping is not aligned to them.
    assert 4 <= (all_arenas("Rss") - before) / MIB <= 8


@linux_only
def test_forked_children_do_not_copy_the_arena() -> None:
    arena = Arena(MIB)
    mapped = mapping_at(arena.address)
    assert mapped is not None
    assert "dc" in mapped["VmFlags"].split()  # "do not copy area on fork", proc(5)


def test_tensors_over_the_same_bytes_share_memory_but_not_storage() -> None:
    arena = Arena(PAGE_ALIGN)
    one = arena.tensor(64, 8, torch.float32)
    two = arena.tensor(64, 8, torch.float32)
    one.fill_(3.0)
    assert two.tolist() == [3.0] * 8
    assert one.data_ptr() == two.data_ptr() == arena.address + 64
    assert storage_use_count(one) == storage_use_count(two) == FRESH_USE_COUNT


def test_each_live_holder_of_a_storage_adds_one_use_until_it_dies() -> None:
    lease = Arena(PAGE_ALIGN).tensor(0, 16, torch.float32)
    assert storage_use_count(lease) == FRESH_USE_COUNT
    view = lease[4:].view(3, 4)
    assert storage_use_count(lease) == FRESH_USE_COUNT + 1
    detached = lease.detach()
    assert storage_use_count(lease) == FRESH_USE_COUNT + 2
    parameter = torch.nn.Parameter(lease)
    assert storage_use_count(lease) == FRESH_USE_COUNT + 3
    same_object = lease
    assert storage_use_count(same_object) == FRESH_USE_COUNT + 3
    del view, detached, parameter
    assert storage_use_count(lease) == FRESH_USE_COUNT


def test_a_view_saved_for_backward_counts_as_a_use_until_the_graph_is_gone() -> None:
    lease = Arena(PAGE_ALIGN).tensor(0, 4, torch.float32)
    lease.fill_(2.0)
    x = torch.ones(4, requires_grad=True)
    loss = (x * lease.view(4)).sum()
    assert storage_use_count(lease) == FRESH_USE_COUNT + 1
    loss.backward()
    assert storage_use_count(lease) == FRESH_USE_COUNT


def test_swapped_parameter_data_counts_as_a_use_until_swapped_back() -> None:
    lease = Arena(PAGE_ALIGN).tensor(0, 4, torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(4))
    placeholder = parameter.data
    parameter.data = lease.view(4)
    assert storage_use_count(lease) == FRESH_USE_COUNT + 1
    parameter.data = placeholder
    assert storage_use_count(lease) == FRESH_USE_COUNT


def test_the_leases_own_tensor_saved_for_backward_is_not_counted() -> None:
    # Why a lease hands out views only. Should torch ever count this, the rule can be dropped.
    lease = Arena(PAGE_ALIGN).tensor(0, 4, torch.float32)
    x = torch.ones(4, requires_grad=True)
    loss = (x * lease).sum()
    assert loss.grad_fn is not None
    assert storage_use_count(lease) == FRESH_USE_COUNT


def test_views_write_through_to_tensors() -> None:
    arena = Arena(PAGE_ALIGN)
    arena.view(8, 4)[:] = b"\x01\x02\x03\x04"
    assert arena.tensor(7, 6, torch.uint8).tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_poison_reads_as_nan_and_keeps_to_its_range(dtype: torch.dtype) -> None:
    arena = Arena(PAGE_ALIGN)
    arena.poison(64, 128)
    assert arena.tensor(64, 128 // dtype.itemsize, dtype).isnan().all()
    assert not arena.tensor(0, 64, torch.uint8).any()
    assert not arena.tensor(192, PAGE_ALIGN - 192, torch.uint8).any()


def test_poison_reads_as_minus_one_in_ints() -> None:
    arena = Arena(64)
    arena.poison(0, 64)
    assert arena.tensor(0, 32, torch.int16).eq(-1).all()


@pytest.mark.parametrize(("offset", "nbytes"), [(-4, 4), (0, 0), (0, 104), (100, 4), (96, 8)])
def test_bytes_outside_the_arena_are_refused(offset: int, nbytes: int) -> None:
    arena = Arena(100)
    with pytest.raises(ValueError, match="arena of 100 bytes"):
        arena.view(offset, nbytes)
    with pytest.raises(ValueError, match="arena of 100 bytes"):
        arena.tensor(offset, nbytes // 4, torch.float32)
    with pytest.raises(ValueError, match="arena of 100 bytes"):
        arena.poison(offset, nbytes)


def test_a_tensor_at_an_offset_its_elements_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="offset 2 is not aligned"):
        Arena(64).tensor(2, 1, torch.float32)


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


def test_a_closed_arena_hands_out_nothing() -> None:
    arena = Arena(64)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.tensor(0, 1, torch.uint8)
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)
    with pytest.raises(ValueError, match="closed"):
        arena.poison(0, 1)


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 byte"):
        Arena(0)


@pytest.mark.parametrize("nbytes", [2**60, 2**70])
def test_more_memory_than_the_system_maps_is_refused_with_the_size_asked(nbytes: int) -> None:
    with pytest.raises(BudgetError, match="PiB"):
        Arena(nbytes)
