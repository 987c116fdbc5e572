"""Figures of the last step, as `optimizer.stats` shows them.

`Engine._take_stats` fills them in, from what lanes, `StepMeter` and the scheduler (`Usage`) have counted.
`train/step_metrics.py` chooses those that metrics.jsonl has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.plan.activations import ActivationBytes
from pagoda.schedule.served import AccessCounts, Found, hit_rate
from pagoda.simulate.timeline import TierUse


@dataclass(frozen=True)
class Staleness:
    """How many steps' gradients were missing from a unit's weights when forward first used them in a step."""

    last: int = 0
    """In the last step."""
    max: int = 0
    """Since `wrap()`."""
    mean: float = 0.0
    """Mean over the steps since `wrap()`."""
    steps: int = 0
    """Number of these steps."""

    def and_one(self, lag: int) -> "Staleness":
        """The same figures with one more step."""
        steps = self.steps + 1
        return Staleness(lag, max(self.max, lag), self.mean + (lag - self.mean) / steps, steps)


@dataclass(frozen=True)
class StepStats:
    """Figures of one step, from the end of the previous `step()`, or from `restart_clock()`, to the end of this one.

    Updates that run during the next forward count there: their bytes and stalls belong to the next step.
    """

    step: int = 0
    grad_norm: float | None = None
    """Global 2-norm of the gradients before clipping."""
    group_norms: tuple[float | None, ...] = ()
    """The norm of each of the `param_groups`. None for a group without gradients."""
    loss_scale: float = 1.0
    """The factor by which the loss of this step was multiplied."""
    skipped: bool = False
    """True if a scaled gradient was not finite. Then the step changed only the loss scale."""
    step_s: float = 0.0
    stall_s: dict[str, float] = field(default_factory=dict)
    """lane -> seconds that compute waited for it. Where it waited for a lane that itself waited for another, such as an
    update that waited for reads, the other one counts."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """lane -> seconds that its threads worked, added up over threads."""
    bytes_moved: dict[str, int] = field(default_factory=dict)
    """lane -> bytes."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """tier -> most bytes in use since `wrap()`."""
    tier_use: dict[str, TierUse] = field(default_factory=dict)
    """tier -> share of its budget that pages took in this step, without offloaded activations: mean and peak."""
    accesses: AccessCounts = field(default_factory=dict)
    """Where weights come from (a tier, or "ranks") -> how often an access found them there (`hit`), on their way
    (`late`) or neither (`fault`), and the seconds that the thread waited (`late_s`, `fault_s`). On a GPU, this thread
    is ahead of compute, so some of the late weights arrive in time."""
    replanned: bool = False
    """True if this step changed the plan, because the model was used in another order than planned."""
    moved: str | None = None
    """What has moved to another tier after this step, and why, in one sentence. None if nothing has."""
    staleness: Mapping[str, Staleness] = field(default_factory=dict)
    """With asynchronous updates: unit -> how far its weights lag. Otherwise empty."""
    updates_kept: int = 0
    """Number of units that were updated during backward before the norm was known, and whose update was kept because
    nothing was clipped."""
    updates_called_off: int = 0
    """Number of units whose update during backward was called off, for example because gradients were clipped."""
    activation_bytes: ActivationBytes = field(default_factory=ActivationBytes)
    """Bytes that graphs kept between forward and backward: in compute's memory at the peak of the step, and offloaded
    at most since `wrap()`."""

    @property
    def faults(self) -> int:
        """Number of accesses whose weights were fetched on demand."""
        return int(sum(counts[Found.FAULT] for counts in self.accesses.values()))

    @property
    def hit_rate(self) -> float:
        """Share of accesses that found the weights in compute's memory. 1.0 if there are none."""
        return hit_rate(self.accesses)
