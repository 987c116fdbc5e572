"""What the scheduler asks for, and what it knows of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from pagoda.memory.page import Run
from pagoda.plan.trace import Trace


class Writes(Enum):
    """Which states an UPDATE, or a PERSIST, writes."""

    ALL = auto()
    WEIGHTS = auto()
    """The master's: it reads the others, and leaves them as they are."""
    MOMENTS = auto()
    """The others: it neither reads nor writes the master's."""


class Kind(StrEnum):
    """The verbs of the scheduler."""

    FETCH = "fetch"
    """Copy a unit's weights from their home into the frames of a lease."""
    RECLAIM = "reclaim"
    """Ask whether anything still refers to some weights: to an ended lease, whose frames are then free, or to the
    weights that an update before `step()` would change. The answer is `reclaimed(freed=...)`."""
    OFFLOAD = "offload"
    """Copy or add the gradient that autograd has just made to the unit's gradient buffer."""
    SPILL = "spill"
    """Write a gradient buffer to SSD, so that its pages can be taken."""
    RELOAD = "reload"
    """Read a gradient that was spilled back into a buffer."""
    UPDATE = "update"
    """Apply the optimizer to a unit. It reports `gradient_used`, `weights_written` and `ended`, in this order; and
    `old_states_kept` before these, if it keeps them. If it is `in_two`, it is only the first of two parts: it writes
    the weights, but not the moments, and does not report `gradient_used`."""
    PERSIST = "persist"
    """The second part of an update `in_two`, of the same step: compute the moments once more, from the old ones and the
    same gradient, and write them. It reports `gradient_used` and `ended`."""
    PUBLISH = "publish"
    """From now on compute reads another extent of a unit's weights, the one that the UPDATE of `steps` writes, or has
    written. Only asynchronous updates need it. In the middle of a step that is drained, the extent stays the same. It
    is not reported."""
    READ_AHEAD = "read_ahead"
    """A unit is likely to be updated next: read its states into buffers that nothing else needs. The executor may drop
    them at any time, and must before anything but an update writes the states. It is not reported."""
    UNDO = "undo"
    """Bring back what a speculative update has changed."""
    SHARE = "share"
    """Have every rank's part of a unit's new weights here, where each has all of them: a speculative update stands,
    and the others have been asked for theirs."""
    SAVE = "save"
    """Read a unit's states for a checkpoint."""


@dataclass(eq=False, slots=True)
class Operation:
    """One piece of work on one unit.

    Each is reported once: as ended or failed. An UPDATE may be refused instead, a RECLAIM is answered, and PUBLISH and
    READ_AHEAD are not reported.
    """

    kind: Kind
    unit: int
    run: Run | None = None
    """The frames of a lease, or the pages of a gradient buffer. Of an UPDATE: where in the reserve it keeps the old
    states for a checkpoint; of a SAVE: where it reads them, if not in their home."""
    version: int = 0
    """The version of the weights that a FETCH or SAVE reads, or that an UPDATE makes."""
    steps: tuple[int, ...] = ()
    """The steps whose gradients an UPDATE applies, oldest first, or the step of an OFFLOAD, SPILL or RELOAD. Of a FETCH
    or PUBLISH of a version that is yet to come, where ranks must agree: the step whose update it waits for."""
    home: int = 0
    """Which of the unit's homes for gradients, where it has some. Of an UPDATE or PUBLISH: which extent of the weights,
    where updates are asynchronous."""
    undoable: bool = False
    """An UPDATE keeps what it changes, as an UNDO may have to bring that back."""
    in_two: bool = False
    """An UPDATE writes the weights only. A PERSIST follows."""
    after_undo: bool = False
    """A FETCH waits for the UNDO that brings its version back. Only where ranks must agree; else it is issued later."""
    about: Any = None
    """The lease, gradient or update that it is about. Only the scheduler uses it."""

    @property
    def writes(self) -> Writes:
        """Which states an UPDATE or PERSIST writes."""
        if self.kind is Kind.PERSIST:
            return Writes.MOMENTS
        return Writes.WEIGHTS if self.in_two else Writes.ALL


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What the scheduler knows of a unit. Sizes are in pages."""

    lease_frames: int = 0
    """The size of a lease; 0 where compute reads the weights in their home."""
    buffer_pages: int = 0
    """The size of a buffer for its gradient; 0 where the gradient has a home in RAM."""
    old_state_pages: int = 0
    """What an update needs in the reserve to keep the old states for a checkpoint."""
    streamed: bool = False
    """Whether its updates read states from SSD, so that reading ahead saves time."""
    trained: bool = True
    speculated: bool = False
    """Whether it may be updated during backward before it is known whether gradients are clipped."""
    in_two: bool = False
    """Whether its updates have two parts, unless they are speculative: UPDATE and PERSIST. Its gradient has a home in
    RAM, updates are synchronous, and none is due before `step()`."""
    updater: int = 0
    """Which of the executor's updaters has it, such as the CPU's or the GPU's: 0 or 1. They do not wait for each
    other."""
    shared: bool = False
    """Whether every rank has all of the weights and updates a part of them."""
    routed: bool = False
    """Whether a router decides in each step whether the unit is used: it is one of an expert."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What the scheduler knows of a plan. Sizes are in pages."""

    units: Sequence[UnitPlan]
    trace: Trace
    frame_pool: int = 0
    """For leases. At least twice the largest, so that one unit can be fetched while another is in use."""
    frame_slab: int = 0
    """Frames of a slab, whose borders no lease straddles; 0: as many as the largest lease has."""
    buffer_pool: int = 0
    """For gradient buffers of units without a home for theirs. At least twice the largest."""
    buffer_slab: int = 0
    """As `frame_slab`, for gradient buffers."""
    spills: bool = True
    """Whether SSD has room for gradients, so that a buffer can be taken from one that waits."""
    reserve_pages: int = 0
    """For old states that a checkpoint has yet to read."""
    during_backward: bool = False
    """Units are updated as soon as backward is through with them, because nothing will be clipped."""
    max_staleness: int | None = None
    """How many steps the weights that a step reads lack at most. None: updates are synchronous."""
    ranks_fetch_alike: bool = False
    """Whether several ranks must fetch the same leases in the same order. Then only what compute does decides on
    fetches, and not when operations end."""

    @property
    def gradient_homes(self) -> int:
        """Homes of each unit's gradient that has any: as many steps' gradients may wait for their update."""
        return 1 + (self.max_staleness or 0)
