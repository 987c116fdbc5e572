"""`optimizer.stats.accesses` tells weights that were there from those that compute waited for."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pagoda
from pagoda.runtime.lanes import Handle

KINDS = {"in_place", "arrived", "late", "fault"}


Steps = Callable[..., list[Any]]


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    """The stats of four steps of a model whose weights are on SSD, or in RAM; `change` prepares its engine."""

    def train(ssd: bool, change: Callable[[Any], None] = lambda engine: None) -> list[Any]:
        sizes: dict[str, Any] = {"page_size": "4KiB", "unit_limit": "8KiB"}
        sizes |= {"host": "160KiB", "ssd": f"{tmp_path}:64MiB"} if ssd else {"host": "64MiB"}
        split = pagoda.Split(weight_share=0.0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        model, optimizer = pagoda.wrap(model, pagoda.AdamW(), memory=pagoda.Memory(split=split, **sizes))
        change(model._pagoda_engine)
        stats = []
        for _ in range(4):
            model(torch.randn(4, 64, dtype=torch.bfloat16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            stats.append(optimizer.stats)
        optimizer.close()
        return stats

    return train


def test_weights_that_live_where_compute_reads_them_are_in_place(steps: Steps) -> None:
    for stats in steps(ssd=False):
        assert stats.accesses.keys() == KINDS
        assert stats.accesses["in_place"] == sum(stats.accesses.values()) > 0
        assert stats.prefetch_hit_rate == 1.0


@pytest.mark.usefixtures("lanes_keep_up")
def test_weights_that_were_fetched_before_they_are_needed_have_arrived(steps: Steps) -> None:
    for stats in steps(ssd=True)[2:]:
        assert stats.accesses["arrived"] > 0
        assert stats.accesses["late"] == 0
        assert stats.prefetch_hit_rate == 1.0 - stats.faults / sum(stats.accesses.values())


def test_weights_that_are_still_on_their_way_are_late_and_no_hit(steps: Steps) -> None:
    def never_in_time(engine: Any) -> None:
        """A fetch is under way until compute waits for something."""
        fill, wait = engine.leases._fetcher.fill, engine.accesses._driver.wait
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

        engine.leases._fetcher.fill, engine.accesses._driver.wait = slowly, release

    for stats in steps(ssd=True, change=never_in_time)[2:]:
        found = stats.accesses
        assert stats.faults == found["fault"]
        assert found["late"] > 0
        assert found["in_place"] == 0
        assert stats.prefetch_hit_rate == found["arrived"] / (found["arrived"] + found["late"] + found["fault"])
        assert stats.prefetch_hit_rate < 1 - stats.faults / sum(found.values())
