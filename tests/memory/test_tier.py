"""Tiers: what is stored is loaded, pages have one owner, ended leases show."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory import (
    FRESH_USE_COUNT,
    PAGE_ALIGN,
    Arena,
    MemoryTier,
    Run,
    SSDTier,
    Tier,
    storage_use_count,
)

PAGE = 2 * PAGE_ALIGN


@pytest.fixture(params=["memory", "ssd"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    """Eight pages of either kind."""
    if request.param == "memory":
        yield MemoryTier("host", Arena(8 * PAGE), PAGE)
    else:
        with SSDTier("ssd", {tmp_path: None}, 8, PAGE) as ssd:
            yield ssd


def pattern(nbytes: int, start: int = 1) -> memoryview:
    view = Arena(nbytes).view(0, nbytes)
    view[:] = bytes((start + k) % 251 for k in range(nbytes))
    return view


def store(tier: Tier, run: Run, offset: int, data: memoryview) -> None:
    if isinstance(tier, SSDTier):
        tier.store(run, offset, data)
    else:
        assert isinstance(tier, MemoryTier)
        tier.view(run, offset, data.nbytes)[:] = data


def load(tier: Tier, run: Run, offset: int, into: memoryview) -> None:
    if isinstance(tier, SSDTier):
        tier.load(run, offset, into)
    else:
        assert isinstance(tier, MemoryTier)
        into[:] = tier.view(run, offset, into.nbytes)


def test_what_is_stored_in_a_run_is_loaded_from_it(tier: Tier) -> None:
    other, run = tier.alloc(1), tier.alloc(3)
    store(tier, other, 0, pattern(PAGE, 7))
    store(tier, run, PAGE, pattern(2 * PAGE))
    got = Arena(2 * PAGE).view(0, 2 * PAGE)
    load(tier, run, PAGE, got)
    assert got == pattern(2 * PAGE)
    beside = Arena(PAGE).view(0, PAGE)
    load(tier, other, 0, beside)
    assert beside == pattern(PAGE, 7)


def test_bytes_are_counted_from_alloc_to_free(tier: Tier) -> None:
    run = tier.alloc(5)
    assert (tier.capacity_bytes, tier.in_use_bytes, tier.peak_bytes) == (8 * PAGE, 5 * PAGE, 5 * PAGE)
    tier.free(run)
    assert (tier.in_use_bytes, tier.peak_bytes) == (0, 5 * PAGE)


def test_a_full_tier_says_its_name_what_was_asked_and_what_there_is(tier: Tier) -> None:
    tier.alloc(6)
    with pytest.raises(
        BudgetError,
        match=rf"'{tier.name}' has no 3 contiguous .*24\.00 KiB asked; 64\.00 KiB in all, 48\.00 KiB in use",
    ):
        tier.alloc(3)


@pytest.mark.parametrize(("offset", "nbytes"), [(-PAGE_ALIGN, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, PAGE_ALIGN)])
def test_bytes_outside_the_run_are_refused_although_the_tier_has_them(tier: Tier, offset: int, nbytes: int) -> None:
    tier.alloc(1)
    run = tier.alloc(2)
    with pytest.raises(ValueError, match=r"Run\(start=1, count=2\) in tier"):
        load(tier, run, offset, pattern(nbytes))
    with pytest.raises(ValueError, match=r"Run\(start=1, count=2\) in tier"):
        store(tier, run, offset, pattern(nbytes))


def test_a_freed_run_is_refused(tier: Tier) -> None:
    run = tier.alloc(2)
    tier.free(run)
    with pytest.raises(ValueError, match="not allocated"):
        tier.free(run)
    with pytest.raises(ValueError, match="not allocated"):
        load(tier, run, 0, pattern(PAGE))
    with pytest.raises(ValueError, match="not allocated"):
        store(tier, run, 0, pattern(PAGE))


def test_threads_never_hold_the_same_page(tier: Tier) -> None:
    holders = [0] * 8
    clashes: list[Run] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                run = tier.alloc(rng.randint(1, 3))
            except BudgetError:
                continue
            for frame in range(run.start, run.stop):
                if holders[frame] != 0:
                    clashes.append(run)
                holders[frame] = seed
            if rng.random() < 0.1:
                time.sleep(0)  # lets another thread run while this one holds pages
            for frame in range(run.start, run.stop):
                holders[frame] = 0
            tier.free(run)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert clashes == []
    assert tier.in_use_bytes == 0
    tier.alloc(8)


def test_leases_of_one_run_have_their_own_storages() -> None:
    host = MemoryTier("host", Arena(4 * PAGE), PAGE)
    host.alloc(1)
    run = host.alloc(2)
    one = host.tensor(run, torch.bfloat16, 8, offset_bytes=64)
    two = host.tensor(run, torch.bfloat16, 8, offset_bytes=64)
    one.fill_(1.5)
    assert two.tolist() == [1.5] * 8
    assert one.data_ptr() == host.arena.address + PAGE + 64
    assert storage_use_count(one) == storage_use_count(two) == FRESH_USE_COUNT


def test_a_tensor_that_leaves_its_run_is_refused() -> None:
    host = MemoryTier("host", Arena(4 * PAGE), PAGE)
    run = host.alloc(1)
    assert host.tensor(run, torch.float32, PAGE // 4).numel() == PAGE // 4
    with pytest.raises(ValueError, match="in tier 'host'"):
        host.tensor(run, torch.float32, PAGE // 4 + 1)


def test_poisoned_pages_are_nan_before_alloc_and_after_free() -> None:
    host = MemoryTier("host", Arena(4 * PAGE), PAGE, poison=True)
    neighbour, run = host.alloc(1), host.alloc(1)
    kept, lease = (host.tensor(of, torch.float32, PAGE // 4) for of in (neighbour, run))
    assert lease.isnan().all()
    kept.fill_(1.0)
    lease.fill_(2.0)
    host.free(run)
    assert lease.isnan().all()
    assert kept.eq(1.0).all()


def test_freeing_a_run_never_allocated_does_not_poison_it() -> None:
    host = MemoryTier("host", Arena(4 * PAGE), PAGE, poison=True)
    lease = host.tensor(host.alloc(2), torch.float32, PAGE // 2)
    lease.fill_(1.0)
    with pytest.raises(ValueError, match="not allocated"):
        host.free(Run(0, 1))
    assert lease.eq(1.0).all()


def test_pages_keep_their_bytes_after_free_without_poison() -> None:
    host = MemoryTier("host", Arena(PAGE), PAGE)
    run = host.alloc(1)
    lease = host.tensor(run, torch.float32, PAGE // 4)
    lease.fill_(1.0)
    host.free(run)
    assert lease.eq(1.0).all()


def test_memory_below_one_page_is_refused_naming_tier_and_sizes() -> None:
    with pytest.raises(ConfigError, match=r"'host' has 8\.00 KiB, less than one page of 4\.00 MiB"):
        MemoryTier("host", Arena(PAGE), 4 * 2**20)


def test_bytes_beyond_the_last_whole_page_are_not_counted() -> None:
    assert MemoryTier("host", Arena(3 * PAGE - 1), PAGE).capacity_bytes == 2 * PAGE
