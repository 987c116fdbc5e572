"""A unit's weights on SSD, of which each rank has a copy and updates a slice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda.mesh.mesh import Mesh
from pagoda.mesh.shards import Shards
from pagoda.mesh.world import World
from pagoda.optim import AdamW
from pagoda.plan.layout import WEIGHT
from pagoda.plan.options import Options
from pagoda.plan.planner import make_plan
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import HOST, Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec
from pagoda.ranks.gathering import SharedWeights
from pagoda.runtime.device import Device
from pagoda.runtime.lanes import Handle, Lane
from pagoda.runtime.store import Store
from pagoda.runtime.updaters import open_update_stream
from pagoda.runtime.updates import Extents, RunningUpdate
from pagoda.schedule.operations import schedule_plan
from pagoda.schedule.scheduler import Scheduler

PAGE = 4096
"""2048 elements of bf16."""


@pytest.mark.parametrize(("trained", "frozen"), [(1024, 0), (1024, 512), (3000, 5000), (9000, 512)])
@pytest.mark.parametrize("rank", range(3))
def test_what_others_have_updated_comes_and_all_else_stays(
    trained: int, frozen: int, rank: int, tmp_path: Path
) -> None:
    """Also where a rank has no slice, as another one has all of the only page."""
    params = [ParamSpec("trained", (trained,)), *([ParamSpec("frozen", (frozen,), trainable=False)] if frozen else [])]
    large = tuple(ModuleSpec(f"{i}", (ParamSpec("w", (1 << 18,)),)) for i in range(12))
    root = ModuleSpec("", tuple(params), large)
    options, ranks = Options(page_bytes=PAGE), Ranks(3, 3, 2)
    plan = make_plan(root, AdamW().states("bf16"), Budgets(1549 * PAGE, ssd=1 << 26), options, ranks)
    shards = Shards(plan.layout, Mesh(World(rank, 3, rank, 3), ranks))
    store = Store(plan, {tmp_path: None}, True, Device(), shards, Scheduler(schedule_plan(plan)))
    lanes = {name: Lane(name) for name in ("ssd_read", "ssd_write")}
    spec = plan.units[0]
    assert store.run_on_ssd(0, WEIGHT) is not None
    unit: Any = SimpleNamespace(index=0, spec=spec)
    before, after = torch.randn(spec.numel).bfloat16(), torch.randn(spec.numel).bfloat16()
    after[spec.trainable_numel :] = before[spec.trainable_numel :]
    own = store.shards.updated(spec)
    store.write(0, WEIGHT, 0, before)
    store.write(0, WEIGHT, own.start, after[own.start : own.stop])
    shared = SharedWeights(store, lanes)
    shared.read_own(unit, store.newest(0, WEIGHT))
    assert torch.equal(shared.weights(unit)[own.start : own.stop], after[own.start : own.stop])
    for span in store.shards.trained_slices(spec):
        shared.weights(unit)[span.start : span.stop] = after[span.start : span.stop]
    shared.write_others(unit, store.newest(0, WEIGHT))
    assert torch.equal(store.read(0, WEIGHT, 0, spec.numel), after)
    for lane in lanes.values():
        lane.close()
    store.close()


def test_frozen_weights_move_with_a_unit_of_which_a_rank_updates_nothing(tmp_path: Path) -> None:
    """The trained ones come from other ranks."""
    params = ParamSpec("trained", (1024,)), ParamSpec("frozen", (512,), trainable=False)
    root, ranks = ModuleSpec("", params), Ranks(3, 3, 2)
    plan = make_plan(root, AdamW().states("bf16"), Budgets(1 << 24), Options(page_bytes=PAGE), ranks)
    rank = next(r for r in range(3) if not len(plan.layout.slices.updated(plan.units[0], r)))
    shards, scheduler = Shards(plan.layout, Mesh(World(rank, 3, rank, 3), ranks)), Scheduler(schedule_plan(plan))
    store = Store(plan, {tmp_path: None}, True, Device(), shards, scheduler)
    frozen = torch.randn(512).bfloat16()
    store.write(0, WEIGHT, 1024, frozen)
    read = scheduler.weights(0).runs
    pool = scheduler.versions.pools[HOST]
    moved = tuple(pool.alloc(run.count) or run for run in read)
    extents = Extents(store.named(0, read), store.named(0, moved))
    unit: Any = SimpleNamespace(index=0, spec=plan.units[0])
    gradient: Any = SimpleNamespace(unit=unit, non_finite=lambda: None)
    lane = Lane("update")
    stream = open_update_stream(store, {"update": lane}, AdamW(), Device())
    update = RunningUpdate(gradient, (), extents, Handle(), Handle(), lambda: None, lambda _: False)
    stream.submit(update)
    assert update.written.succeeded
    assert torch.equal(store.tensor(0, WEIGHT, extents.write[WEIGHT])[1024:1536], frozen)
    stream.close()
    lane.close()
    store.close()
