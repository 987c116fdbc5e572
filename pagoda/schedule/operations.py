"""The operations that the scheduler issues, and its view of a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pagoda.memory.page import PageRun
from pagoda.plan.layout import GRAD, WEIGHT_BACK
from pagoda.plan.placement import LEASES, STAGING, VERSIONS
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import HOST, SSD
from pagoda.plan.trace import Trace
from pagoda.schedule.records import GradientRecord, Lease, UpdateRecord


@dataclass(eq=False, slots=True)
class Operation:
    """One piece of work on one unit. Each kind is a class of its own.

    Each operation is reported once, as ended or failed, unless its class says otherwise. The executor keeps what it
    knows in the `payload` of the records that operations name. Other texts write FETCH for an operation of the class
    `Fetch`.
    """

    reported: ClassVar[bool] = True
    """Whether its end is reported."""

    unit: int


# --- weights ---


@dataclass(eq=False, slots=True)
class Fetch(Operation):
    """Copy a unit's weights from their home into the frames of a lease."""

    lease: Lease
    awaited: GradientRecord | None
    """If ranks must agree: the gradient whose update makes the version to read, unless all of that version is
    written."""


@dataclass(eq=False, slots=True)
class Question(Operation):
    """A lease has ended, or an update is to change weights. Does anything still refer to them? The answer is
    `reclaimed(freed=...)`. If something does, `let_go` follows once nothing does."""


@dataclass(eq=False, slots=True)
class Evict(Question):
    """About a lease that has ended to make room for another. Its frames are given back if nothing refers to them."""

    lease: Lease


@dataclass(eq=False, slots=True)
class Outdate(Question):
    """About a lease that has ended because its weights change, or could not be fetched. Frames are given back too."""

    lease: Lease


@dataclass(eq=False, slots=True)
class Ask(Question):
    """About the weights that an update would change: one before `step()`, or one that has to move them."""

    update: UpdateRecord


@dataclass(eq=False, slots=True)
class Adopt(Operation):
    """Accesses read another run of a unit's weights from now on."""

    reported = False

    run: PageRun
    version: int


@dataclass(eq=False, slots=True)
class Free(Operation):
    """Nothing needs what a run holds of one of a unit's states."""

    reported = False

    state: int
    run: PageRun


@dataclass(eq=False, slots=True)
class Save(Operation):
    """Read a unit's states for a checkpoint."""

    version: int
    runs: tuple[PageRun, ...]
    """The run of each state, and behind them that of the weights that accesses read."""


# --- gradients ---


@dataclass(eq=False, slots=True)
class GradientMove(Operation):
    """Moves a gradient into or out of its buffer."""

    gradient: GradientRecord


@dataclass(eq=False, slots=True)
class Offload(GradientMove):
    """Copy the gradient that autograd has just made to the buffer, or add it there."""

    delivery: Any
    """What the event `gradient` or `reduce` told of this part of the gradient."""


@dataclass(eq=False, slots=True)
class Spill(GradientMove):
    """Write the buffer to SSD, so that its pages can be reused."""


@dataclass(eq=False, slots=True)
class Reload(GradientMove):
    """Read a spilled gradient back into a buffer."""


# --- updates ---


@dataclass(eq=False, slots=True)
class Update(Operation):
    """Apply the optimizer to a unit. It reports `gradient_used`, `weights_written` and `ended`, in this order. It may
    be `refused` instead."""

    update: UpdateRecord
    version: int
    """The version that it makes."""


@dataclass(eq=False, slots=True)
class Request(Operation):
    """An update before `step()` is requested for good, because nothing will be clipped."""

    reported = False

    gradient: GradientRecord


@dataclass(eq=False, slots=True)
class Confirm(Operation):
    """`step()` has made a speculative update final that is under way."""

    reported = False

    update: UpdateRecord


@dataclass(eq=False, slots=True)
class ReadAhead(Operation):
    """Read the states of the unit that will probably be updated next into buffers that nothing else needs. The executor
    may drop them at any time, and must drop them before anything but an update writes the states."""

    reported = False


@dataclass(eq=False, slots=True)
class Share(Operation):
    """Collect every rank's part of a unit's new weights, if each rank has all weights and updates a part. It is issued
    when the update is requested, and waits until this rank's part is written."""

    update: UpdateRecord
    version: int


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The scheduler's view of a unit. Sizes are in pages."""

    lease_frames: int = 0
    """The size of a lease. 0 if compute reads the weights in their home."""
    buffer_pages: int = 0
    """The size of a shared buffer for its gradient. 0 if the unit has buffers of its own."""
    states: tuple[tuple[str, int], ...] = ()
    """The tier and the pages of each state. The first state is the weights."""
    streamed: bool = False
    """Whether its updates read states from SSD, so that reading ahead saves time."""
    trained: bool = True
    speculated: bool = False
    """Whether the unit may be updated during backward, before it is known whether gradients are clipped. There are
    spare runs for its states."""
    updater: int = 0
    """Which of the executor's updaters (such as the CPU's and the GPU's) updates the unit: 0 or 1. Updaters do not wait
    for each other."""
    shared: bool = False
    """Whether every rank has all of the weights and updates a part of them."""
    routed: bool = False
    """Whether the unit belongs to an expert, so that a router decides in each step whether it is used."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The scheduler's view of a plan. Sizes are in pages."""

    units: Sequence[UnitPlan]
    trace: Trace
    frame_pool: int = 0
    """Frames for leases: for all of them, or at least twice the largest, so that one unit can be fetched while another
    is in use."""
    frame_slab: int = 0
    """Frames per slab. No lease crosses a border of slabs. 0: the size of the largest lease."""
    buffer_pool: int = 0
    """Pages for gradient buffers that units share."""
    buffer_slab: int = 0
    """Like `frame_slab`, for gradient buffers."""
    spills: bool = True
    """Whether SSD has room for gradients, so that the buffer of a waiting gradient can be reused."""
    spares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tier -> the pages of each spare run for versions of states."""
    reserve: Mapping[str, int] = field(default_factory=dict)
    """Tier -> pages for runs of any size, in addition to the spare ones."""
    during_backward: bool = False
    """Whether units are updated as soon as backward has finished with them, because nothing will be clipped."""
    asynchronous: bool = False
    """Whether the weights that a step reads lack the gradient of the step before, whose updates run meanwhile."""
    ranks_fetch_alike: bool = False
    """Whether several ranks must fetch the same leases in the same order. Then only events of compute decide on
    fetches, and not the ends of operations."""

    @property
    def own_buffers(self) -> int:
        """The number of gradient buffers of a unit that has its own. The gradients of this number of steps may wait for
        updates."""
        return 1 + self.asynchronous


def schedule_plan(plan: Plan) -> SchedulePlan:
    """The scheduler's view of `plan`: sizes in pages, and which rules apply."""
    placement, tier = plan.placement, plan.lease_tier
    staging = placement.pages(HOST, STAGING)
    leased, spares = plan.leased_pages(), plan.spare_runs
    on_device = placement.on_device
    units = tuple(
        UnitPlan(
            lease_frames=leased.get(unit.index, 0),
            buffer_pages=_buffer_pages(plan, unit.index),
            states=tuple(
                (placement.homes.get((unit.index, state.name), HOST), plan.layout.pages(unit, state.name))
                for state in plan.layout.states_of(unit)
            ),
            streamed=any(placement.home(unit.index, state.name) == SSD for state in plan.layout.states_of(unit)),
            trained=unit.trainable_numel > 0,
            speculated=unit.index in placement.speculated,
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
        spares=spares,
        reserve={
            HOST: sum(placement.pages(HOST, line) for line in (WEIGHT_BACK, VERSIONS)) - sum(spares.get(HOST, ()))
        },
        during_backward=plan.options.update_during_backward,
        asynchronous=plan.options.asynchronous,
        ranks_fetch_alike=plan.ranks.count > 1,
    )


def _buffer_pages(plan: Plan, unit: int) -> int:
    """Pages of a shared buffer for a unit's gradient. 0 if the unit has buffers of its own.

    Without SSD, gradients that are used at once by updates during backward have RAM as their home, but only shared
    buffers.
    """
    home = plan.placement.home(unit, GRAD)
    shared = home == SSD or (home == HOST and GRAD not in plan.placement.lines[HOST])
    return plan.layout.pages(plan.units[unit], GRAD) if shared else 0
