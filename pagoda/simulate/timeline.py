"""A timeline: the work of each lane over one step, simulated or measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pagoda.plan.lanes import LaneName
from pagoda.schedule.served import AccessCounts, Served, count_accesses

_BINDING = 0.05
"""Share of a step for which compute waits for a lane that binds it, at least."""


class TimelineSpan(NamedTuple):
    """One piece of work on one lane. Seconds count from the start of the step."""

    lane: str
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0

    @property
    def kind(self) -> str:
        """The kind of work: the first word of its name."""
        return self.name.partition(" ")[0]


@dataclass(frozen=True)
class TierUse:
    """Share of a tier's budget that is in use during a step."""

    mean: float
    peak: float


@dataclass(frozen=True)
class Timeline:
    """One step of every lane, in steady state.

    If steps differ permanently, as with asynchronous updates, `step_s` and `stall_s` are means, and everything else is
    that of a step of about that length.
    """

    step_s: float
    spans: tuple[TimelineSpan, ...]
    """Spans of all lanes, in the order of their ends. Work that began in the previous step has a negative start."""
    stall_s: Mapping[str, float]
    """lane -> seconds that compute waited for it. A lane that itself waits passes that on, as in
    `schedule.waits.charged`."""
    held_bytes: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    """tier -> (seconds, bytes in use from then on)."""
    accesses: tuple[Served, ...] = ()
    """The accesses of compute to units, in order."""

    @cached_property
    def access_counts(self) -> AccessCounts:
        """How many accesses were hits, by where the weights come from."""
        return count_accesses(self.accesses)

    @cached_property
    def busy_s(self) -> Mapping[str, float]:
        """lane -> seconds in which it worked, within the step."""
        busy: dict[str, float] = {}
        for span in self.spans:
            busy[span.lane] = busy.get(span.lane, 0.0) + span.end_s - max(0.0, span.start_s)
        return busy

    def tier_use(self, budgets: Mapping[str, int | None]) -> dict[str, TierUse]:
        """tier -> how much of its budget is in use, for tiers that have one."""
        uses = {}
        for tier, account in self.held_bytes.items():
            if budget := budgets.get(tier):
                ends = [seconds for seconds, _ in account[1:]] + [self.step_s]
                held = [(end - begin, nbytes) for (begin, nbytes), end in zip(account, ends, strict=True)]
                mean = sum(seconds * nbytes for seconds, nbytes in held) / self.step_s
                uses[tier] = TierUse(mean / budget, max(nbytes for _, nbytes in held) / budget)
        return uses

    @cached_property
    def bytes_moved(self) -> Mapping[str, int]:
        """lane -> bytes of the spans that ended in the step."""
        moved: dict[str, int] = {}
        for span in self.spans:
            moved[span.lane] = moved.get(span.lane, 0) + span.nbytes
        return moved

    @cached_property
    def pass_s(self) -> float:
        """Seconds per micro-batch: from one forward to the next, without the first of the step, which waits for
        updates. If there are few, the mean from the first forward to the end of the last backward."""
        compute = [span for span in self.spans if span.lane == LaneName.COMPUTE]
        backward = [span.name.startswith("backward") for span in compute]
        begins = [
            span.start_s
            for span, before, now in zip(compute, [True, *backward], backward, strict=False)
            if before and not now and not span.name.startswith("step")
        ]
        if len(begins) > 2:
            return (begins[-1] - begins[1]) / (len(begins) - 2)
        end = max(span.end_s for span in compute if not span.name.startswith("step"))
        return (end - begins[0]) / len(begins)

    @property
    def binding_lane(self) -> str:
        """The lane that a faster machine would have to speed up first: the one for which compute waits most, if that is
        more than a twentieth of the step, otherwise compute."""
        lane, seconds = max(self.stall_s.items(), key=lambda item: item[1], default=(LaneName.COMPUTE, 0.0))
        return lane if seconds > _BINDING * self.step_s else LaneName.COMPUTE
