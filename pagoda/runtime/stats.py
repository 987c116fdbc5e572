"""What the last step cost: the figures behind `optimizer.stats`."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pagoda.plan.activations import ActivationBytes
from pagoda.runtime.timeline_recorder import TimelineRecorder


@dataclass(frozen=True)
class Staleness:
    """Steps whose gradients were not in a unit's weights when forward first used them in a step."""

    last: int = 0
    """In the last step."""
    max: int = 0
    """Since `wrap()`."""
    mean: float = 0.0
    """Over the steps since `wrap()`."""
    steps: int = 0
    """How many steps those are."""

    def and_one(self, lag: int) -> "Staleness":
        """The same with one step more."""
        steps = self.steps + 1
        return Staleness(lag, max(self.max, lag), self.mean + (lag - self.mean) / steps, steps)


class Found(StrEnum):
    """Where an access found the weights of its unit."""

    IN_PLACE = "in_place"
    """At home, where compute reads them: nothing is fetched."""
    ARRIVED = "arrived"
    """Fetched: compute did not wait for them."""
    LATE = "late"
    """On their way: compute waited for what was left of the fetch, or of the update that must come first."""
    FAULT = "fault"
    """Neither there nor on their way: fetched on demand, while compute waited."""


@dataclass(frozen=True)
class StepStats:
    """Figures of one step, from the end of the previous `step()` to the end of this one.

    Updates that run under the next forward count there: their bytes and stalls belong to the next step.
    """

    step: int = 0
    grad_norm: float | None = None
    """Global 2-norm of the gradients before clipping."""
    group_norms: tuple[float | None, ...] = ()
    """The same for each of the `param_groups`; None for one without gradients."""
    loss_scale: float = 1.0
    """What the loss of this step was multiplied by."""
    skipped: bool = False
    """True when a scaled gradient was not finite, so that the step changed nothing but the loss scale."""
    step_s: float = 0.0
    stall_s: dict[str, float] = field(default_factory=dict)
    """lane -> seconds compute waited for it."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """lane -> seconds its threads worked, summed over threads."""
    bytes_moved: dict[str, int] = field(default_factory=dict)
    """lane -> bytes."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """tier -> most bytes in use since `wrap()`."""
    accesses: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(Found, 0))
    """Accesses of units by what they found: the weights in place, arrived, late, or nothing (a fault)."""
    replanned: bool = False
    """True when this step changed the plan, because the model was used in another order than planned."""
    staleness: Mapping[str, Staleness] = field(default_factory=dict)
    """unit -> how far its weights lag, with asynchronous updates; else empty."""
    updates_kept: int = 0
    """Units updated during backward before the norm was known, whose update stood: nothing was clipped."""
    updates_undone: int = 0
    """Units whose update during backward was undone: the gradients were clipped, or the states were asked for."""
    activation_bytes: ActivationBytes = field(default_factory=ActivationBytes)
    """What graphs kept between forward and backward: in compute's memory at the worst moment of the step, and offloaded
    since `wrap()`."""

    @property
    def faults(self) -> int:
        """Accesses whose weights had to be fetched on demand."""
        return self.accesses[Found.FAULT]

    @property
    def prefetch_hit_rate(self) -> float:
        """Share of the accesses to weights that are fetched which did not wait for them: arrived, of arrived, late and
        faults; 1.0 when there are none."""
        fetched = sum(self.accesses.values()) - self.accesses[Found.IN_PLACE]
        return self.accesses[Found.ARRIVED] / fetched if fetched else 1.0


class Meter:
    """Counts what happens during a step."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._lanes = lanes
        self.recorder: TimelineRecorder | None = None
        """Where the step is recorded, if anywhere."""
        self.reset()

    def reset(self) -> None:
        """Start a step."""
        self.started = time.perf_counter()
        self.stall_s = dict.fromkeys(self._lanes, 0.0)
        self.accesses = dict.fromkeys(Found, 0)

    def stalled(self, lane: str, seconds: float) -> None:
        """Compute waited for `lane`."""
        with self._lock:
            self.stall_s[lane] += seconds
            if self.recorder is not None:
                self.recorder.waited(seconds)
