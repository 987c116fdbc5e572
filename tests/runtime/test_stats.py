"""`optimizer.stats.accesses` tells weights that were there from those that compute waited for, by where they come
from."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pagoda
from pagoda.runtime.lanes import Handle

from .conftest import Wrap


def steps(
    wrap: Wrap,
    ssd: Path | None,
    change: Callable[[Any], None] = lambda engine: None,
    between: Callable[[Any], object] = lambda model: None,
) -> list[Any]:
    """The stats of four steps of a model whose weights are on SSD, or in RAM. `change` prepares its engine, and
    `between` comes before each step."""
    sizes: dict[str, Any] = {"page_size": "4KiB", "unit_limit": "8KiB"}
    sizes |= {"host": "64MiB"} if ssd is None else {"host": "160KiB", "ssd": f"{ssd}:64MiB"}
    memory = pagoda.Memory(**sizes)
    model, optimizer = wrap(nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))), memory)
    change(model._pagoda_engine)
    stats = []
    for _ in range(4):
        between(model)
        model(torch.randn(4, 64, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        stats.append(optimizer.stats)
    return stats


def accesses_of(stats: Any) -> int:
    """The number of all accesses."""
    return sum(int(counts[found]) for counts in stats.accesses.values() for found in ("hit", "late", "fault"))


@pytest.mark.usefixtures("lanes_keep_up")
def test_weights_are_in_place_where_compute_reads_them_or_arrive_in_time(wrap: Wrap, tmp_path: Path) -> None:
    for stats in steps(wrap, None):
        assert stats.accesses.keys() == {"host"}
        assert stats.accesses["host"]["hit"] > 0
        assert stats.hit_rate == 1.0
    for stats in steps(wrap, tmp_path)[2:]:
        assert stats.accesses["ssd"]["hit"] > 0
        assert all(counts["late"] == 0 for counts in stats.accesses.values())
        assert stats.hit_rate == 1.0 - stats.faults / accesses_of(stats)


@pytest.mark.usefixtures("lanes_keep_up")
def test_weights_that_nothing_has_fetched_are_a_fault_and_compute_waits_for_all_of_the_fetch(
    wrap: Wrap, tmp_path: Path
) -> None:
    @torch.no_grad()
    def out_of_order(model: Any) -> None:
        for index in (9, 3):
            model[index](torch.randn(4, 64, dtype=torch.bfloat16))

    for stats in steps(wrap, tmp_path, between=out_of_order)[2:]:
        assert stats.faults == stats.accesses["ssd"]["fault"] > 0
        assert stats.accesses["ssd"]["fault_s"] > 0


def test_weights_that_are_still_on_their_way_are_late_and_no_hit(wrap: Wrap, tmp_path: Path) -> None:
    def never_in_time(engine: Any) -> None:
        """A fetch is under way until compute waits for something."""
        fill, wait = engine.leases._fill, engine.accesses._driver.wait
        lock, held, waiting = threading.Lock(), list[tuple[Handle, Handle]](), False

        def slowly(*lease: Any) -> Handle:
            work = fill(*lease)
            late = Handle(work.lane)
            with lock:
                if not waiting:
                    held.append((work, late))
                    return late
            work.then(late.finish)
            return late

        def release(*condition: Any) -> None:
            nonlocal waiting
            with lock:
                waiting = True
            for work, late in held:
                work.then(late.finish)
            held.clear()
            wait(*condition)
            waiting = False

        engine.leases._fill, engine.accesses._driver.wait = slowly, release

    for stats in steps(wrap, tmp_path, never_in_time)[2:]:
        found = stats.accesses["ssd"]
        assert stats.faults == found["fault"]
        assert found["late"] > 0
        assert found["late_s"] > 0
        assert stats.hit_rate == sum(counts["hit"] for counts in stats.accesses.values()) / accesses_of(stats)
        assert stats.hit_rate < 1 - stats.faults / accesses_of(stats)
