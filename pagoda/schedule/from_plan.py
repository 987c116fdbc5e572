"""Makes the scheduler's view of a plan."""

from pagoda.plan.layout import GRAD
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import CHECKPOINT, LEASES, STAGING
from pagoda.plan.planner import Plan
from pagoda.schedule.operations import SchedulePlan, UnitPlan


def schedule_plan(plan: Plan) -> SchedulePlan:
    """The scheduler's view of `plan`: sizes in pages, and which rules apply."""
    placement, tier = plan.placement, plan.lease_tier
    staging = placement.pages(HOST, STAGING)
    leased = plan.leased_pages()
    on_device = placement.on_device
    units = tuple(
        UnitPlan(
            lease_frames=leased.get(unit.index, 0),
            buffer_pages=_buffer_pages(plan, unit.index),
            old_state_pages=sum(plan.pages_in_memory(unit).values()),
            streamed=any(placement.home(unit.index, state.name) == SSD for state in plan.layout.states),
            trained=unit.trainable_numel > 0,
            speculated=unit.index in placement.speculated,
            in_two=unit.index in placement.in_two,
            updater=int(unit.index in on_device),
            shared=plan.layout.gathers_after_update(unit),
            routed=unit.index in plan.layout.expert_units,
        )
        for unit in plan.units
    )
    return SchedulePlan(
        units,
        plan.trace,
        frame_pool=0 if tier is None else placement.pages(tier, LEASES),
        frame_slab=plan.lease_slab if leased else 0,
        buffer_pool=staging,
        buffer_slab=staging if sum(unit.buffer_pages for unit in units) <= staging else 0,
        spills=GRAD in placement.lines.get(SSD, {}),
        reserve_pages=placement.pages(HOST, CHECKPOINT) - plan.layout.piece_pages,
        during_backward=plan.options.update_during_backward,
        max_staleness=plan.options.max_staleness,
        ranks_fetch_alike=plan.ranks.count > 1,
    )


def _buffer_pages(plan: Plan, unit: int) -> int:
    """Pages of a shared buffer for a unit's gradient. 0 if the gradient has a home.

    Without SSD, gradients that are used at once by updates during backward have RAM as their home, but only shared
    buffers.
    """
    home = plan.placement.home(unit, GRAD)
    shared = home == SSD or (home == HOST and GRAD not in plan.placement.lines[HOST])
    return plan.layout.pages(plan.units[unit], GRAD) if shared else 0
