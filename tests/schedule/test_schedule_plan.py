"""The scheduler's view of a plan."""

from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options
from pagoda.plan.placement import Budgets
from pagoda.plan.planner import make_plan
from pagoda.schedule.frames import Frames
from pagoda.schedule.operations import schedule_plan
from tests.plan.strategies import LARGE, STATES
from tests.plan.test_planner import tower


def test_leases_and_shared_buffers_fit_the_pools_that_the_plan_has() -> None:
    plan = make_plan(tower(8, 256), STATES["bf16"], Budgets(3 << 20, ssd=LARGE), Options(page_bytes=4096))
    scheduled = schedule_plan(plan)
    assert {unit: of.lease_frames for unit, of in enumerate(scheduled.units) if of.lease_frames} == plan.leased_pages()
    assert scheduled.frame_pool >= 2 * max(plan.leased_pages().values())
    buffers = [of.buffer_pages for of in scheduled.units]
    assert all(pages in (0, plan.layout.pages(plan.units[unit], GRAD)) for unit, pages in enumerate(buffers))
    assert scheduled.buffer_pool >= max(buffers) > 0


def test_with_all_states_in_ram_nothing_needs_a_lease_or_a_shared_buffer() -> None:
    plan = make_plan(tower(8, 64), STATES["bf16"], Budgets(LARGE), Options(page_bytes=4096))
    assert not any(of.lease_frames or of.buffer_pages for of in schedule_plan(plan).units)


def test_where_all_leases_fit_at_once_a_slab_is_no_obstacle() -> None:
    plan = make_plan(tower(3, 64), STATES["bf16"], Budgets(LARGE, LARGE), Options(page_bytes=4096))
    scheduled = schedule_plan(plan)
    frames = Frames(scheduled.frame_pool, scheduled.frame_slab)
    assert all(frames.alloc(unit.lease_frames) is not None for unit in scheduled.units)
