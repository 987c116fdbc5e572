"""The simulated updater of asynchronous updates, which follows the rules of the runtime's."""

from dataclasses import dataclass

from pagoda.plan.planner import Plan
from pagoda.simulate.lanes import SimulatedLanes, Task
from pagoda.simulate.rates import Rates
from pagoda.simulate.updates import SimulatedUpdater


@dataclass(slots=True)
class _Progress:
    """How far the gradients of one unit have come, counted in steps. None is in two places."""

    waiting: int = 0
    applying: int = 0
    applied: int = 0
    """In the back of the weights, not in the front."""
    writing: bool = False
    fixed: bool = False
    """Whether the front is in use in this step, so that it stays what it is."""
    wanted: Task | None = None
    """Ends when the front lags no more than it may: what compute, or a fetch, waits for."""


class SimulatedAsyncUpdater(SimulatedUpdater):
    """Sweeps units as long as gradients wait: all that waits of the one that is waited for, or has waited longest.

    Weights are published between a unit's last use in one step and its first in the next. Nothing is read ahead.
    """

    def __init__(self, plan: Plan, lanes: SimulatedLanes, rates: Rates) -> None:
        super().__init__(plan, lanes, rates)
        assert plan.options.max_staleness is not None, "the plan's updates are synchronous"
        self._most = plan.options.max_staleness
        self._progress = [_Progress() for _ in plan.units]

    def published(self, unit: int) -> Task | None:
        """Ends when what forward reads of a unit lags no more than it may; None where that is so. It is not exchanged
        any more in this step."""
        progress = self._progress[unit]
        if progress.fixed:
            return None
        if progress.wanted is None:
            wanted = progress.wanted = self._lanes.milestone(self._lane_waited_for(unit))
            self._publish(progress)
            if wanted.done:
                return None
            self.pump()
        return progress.wanted

    def queue(self, unit: int, gradient: list[Task], reload: bool) -> Task:
        """One more step's gradient of the unit waits. It is in RAM, where it has a buffer until it has been applied."""
        self._progress[unit].waiting += 1
        return self._lanes.milestone(self._path.update)

    def end_of_step(self) -> None:
        """The graphs of this step are done with: every unit may show its newest weights."""
        for progress in self._progress:
            progress.fixed = False
            self._publish(progress)

    def _begin(self) -> bool:
        if self._current is not None:
            return False
        ready = [unit for unit, p in enumerate(self._progress) if p.waiting and not p.writing and not p.applied]
        if not ready:
            return False
        unit = min(
            ready, key=lambda u: (self._progress[u].wanted is None, -self._progress[u].waiting, self._urgency[u])
        )
        progress = self._progress[unit]
        progress.applying, progress.waiting, progress.writing = progress.waiting, 0, True
        update = self._new_update(unit, [], reload=False, steps=progress.applying)

        def published() -> None:
            progress.applied, progress.applying = progress.applying, 0
            self._publish(progress)
            self.pump()

        def written() -> None:
            progress.writing = False

        update.published.then.append(published)
        update.written.then.append(written)
        self._take_up(update)
        return True

    def _read_ahead(self) -> bool:
        return False

    def _publish(self, progress: _Progress) -> None:
        """Make the newest weights those that forward reads, unless it reads the others in this step."""
        if progress.fixed:
            return
        if not progress.applying:
            progress.applied = 0
        if progress.wanted is not None and progress.waiting + progress.applying <= self._most:
            wanted, progress.wanted = progress.wanted, None
            progress.fixed = True
            self._lanes.end(wanted)
