"""Runs of states: no two share a page, references are counted, and spare runs are always there again."""

import pytest
from hypothesis import given, strategies as st

from pagoda.memory.page import PageRun
from pagoda.memory.versions import EMPTY, VersionPool

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(homes=SIZES, spared=st.data(), reserve=st.integers(0, 9), moves=st.lists(st.integers(0, 30), max_size=40))
def test_whatever_moved_every_spare_run_is_free_once_each_state_has_one(
    homes: list[int], spared: st.DataObject, reserve: int, moves: list[int]
) -> None:
    spares = spared.draw(st.lists(st.sampled_from(homes), max_size=4))
    pool = VersionPool(homes, spares, reserve)
    runs = [pool.alloc(count) for count in homes]
    starts = [run.start for run in runs if run is not None and run.count]
    assert starts == sorted(starts)
    pinned: list[PageRun] = []
    for move in moves:
        state = move % len(homes)
        before = runs[state]
        assert before is not None
        if move % 3 == 0:  # a reader keeps it
            pool.pin(before)
            pinned.append(before)
            assert pool.is_shared(before) is (before.count > 0)
        elif (after := pool.alloc(homes[state])) is not None:
            runs[state] = after
            assert pool.unpin(before) is (before.count > 0 and before not in pinned)
        elif pinned:
            pool.unpin(pinned.pop())
        live = {*(run for run in runs if run is not None), *pinned} - {EMPTY}
        pages = [page for run in live for page in range(run.start, run.stop)]
        assert len(pages) == len({*pages}) == pool.in_use <= pool.pages
    for run in pinned:
        pool.unpin(run)
    assert all(pool.has(count) and pool.alloc(count) is not None for count in spares)


def test_a_run_without_references_cannot_be_kept() -> None:
    pool = VersionPool([2])
    run = pool.alloc(2)
    assert run is not None
    assert pool.alloc(2) is None
    assert pool.unpin(run)
    for use in (pool.pin, pool.unpin):
        with pytest.raises(KeyError):
            use(run)
