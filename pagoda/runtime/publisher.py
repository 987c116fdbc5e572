"""The publisher: which weights forward reads while updates run beside it, and how far they lag."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagoda.plan.trace import Phase
from pagoda.runtime.async_updates import AsyncUpdater
from pagoda.runtime.stats import Staleness
from pagoda.runtime.unit import LiveUnit


@dataclass
class _Observed:
    """Staleness of one unit at its first use in each step so far."""

    last: int = 0
    most: int = 0
    total: int = 0
    steps: int = 0

    def note(self, staleness: int) -> None:
        self.last = staleness
        self.most = max(self.most, staleness)
        self.total += staleness
        self.steps += 1


class Publisher:
    """Publishes new weights between a unit's last use in one step and its first use in the next.

    The staleness of a unit is the number of `step()`s whose gradients are not in the weights that its forward reads;
    it is never above `max_staleness`. From a unit's first use until the next `step()` its weights stay the same:
    forward, backward and what a checkpoint recomputes see the same ones. What has been fetched for a step is used in
    it, though newer weights may be there by then. Publishing is an exchange of two extents, so nobody waits for it.
    Only the compute thread calls this class.
    """

    def __init__(
        self,
        updater: AsyncUpdater,
        units: Sequence[LiveUnit],
        max_staleness: int,
        changed: Callable[[LiveUnit], None],
        stalled: Callable[[str, float], None],
    ) -> None:
        self._updater = updater
        self._units = units
        self._max_staleness = max_staleness
        self._changed = changed
        """Told that leases and graphs of a unit are out of date."""
        self._stalled = stalled
        self._fixed: set[int] = set()
        """Units used in this step."""
        self._fetched: set[int] = set()
        """Units whose weights were fetched for this step."""
        self._observed = {unit.index: _Observed() for unit in units if unit.trainable}

    @property
    def in_step(self) -> bool:
        """True once the model has been used since the last `step()`."""
        return bool(self._fixed)

    def before_use(self, unit: LiveUnit, phase: Phase) -> None:
        """Before compute reads a unit's weights: nothing if it did in this step already, else as before a fetch.

        Backward without a forward in this step is that of an older graph, which needs the weights of its forward.
        """
        if unit.index in self._fixed:
            return
        if phase is Phase.FORWARD:
            self.before_fetch(unit)
            if unit.index in self._observed:
                self._observed[unit.index].note(self._updater.lag(unit))
        self._fixed.add(unit.index)

    def before_fetch(self, unit: LiveUnit) -> None:
        """Publish what there is, and wait while that lags too far; nothing if that has been done in this step."""
        if unit.index in self._fixed or unit.index in self._fetched:
            return
        self.publish(unit)
        if self._updater.staleness(unit) > self._max_staleness:
            self._wait(unit)
        self._fetched.add(unit.index)

    def may_fetch(self, unit: LiveUnit) -> bool:
        """Whether a fetch would bring weights that are new enough."""
        return unit.index in self._fixed or self._updater.staleness(unit) <= self._max_staleness

    def publish(self, unit: LiveUnit) -> bool:
        """Make the newest weights of a unit those that forward reads; False if they are."""
        if not self._updater.swap(unit):
            return False
        self._changed(unit)
        return True

    def publish_idle(self) -> None:
        """Publish every unit that is not in use in this step."""
        for unit in self._units:
            if unit.index not in self._fixed and self.publish(unit):
                self._fetched.discard(unit.index)

    def end_of_step(self) -> None:
        """The graphs of this step are done with."""
        self._fixed.clear()
        self._fetched.clear()
        self.publish_idle()

    def staleness(self) -> Mapping[str, Staleness]:
        """By name of unit."""
        return {
            self._units[index].spec.name: Staleness(seen.last, seen.most, seen.total / seen.steps)
            for index, seen in self._observed.items()
            if seen.steps
        }

    def _wait(self, unit: LiveUnit) -> None:
        start = time.perf_counter()
        while self._updater.staleness(unit) > self._max_staleness:
            self._updater.wait(unit, self._max_staleness)
            self.publish(unit)
        self._stalled(self._updater.lane(unit), time.perf_counter() - start)
