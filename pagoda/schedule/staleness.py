"""Asynchronous updates: which of them accesses see.

The weights that a step reads lack exactly the gradient of the step before. So an update has the time of a step to run.
`step()` queues it, and the next `step()` shows its weights to accesses, by ADOPT. For example, the seventh step reads
version 5, while the update with the sixth step's gradient makes version 6. The version that a step reads does not
depend on when updates end, so ranks agree on it without a message.

Before states are read from outside, all updates are announced (`announce_all`), so that a drain completes them.
That changes nothing that steps read. A drain also shows the result (`show_all`), unless a step has begun. A checkpoint
only announces, and saves which weights lag, so that a resumed run goes on as if nothing had happened.
"""

from dataclasses import dataclass

from pagoda.schedule.leases import Leases
from pagoda.schedule.updates import UpdateSchedule
from pagoda.schedule.versions import Versions


@dataclass(eq=False, repr=False)
class StalenessSchedule:
    """Shows asynchronous updates. Does nothing if updates are synchronous.

    Invariants: all accesses of a step see the same version of a unit; an update changes no weights that a step reads.
    """

    _versions: Versions
    _leases: Leases
    _updates: UpdateSchedule
    step_begun: bool = False
    """Whether compute has used a unit in a step since the last `step()`."""

    def end_step(self) -> None:
        """`step()` is about to request updates. Accesses see those of the step before."""
        self.step_begun = False
        self.show_all()

    def show_all(self) -> None:
        """Accesses see every update from now on, or from the next `step()` on if a step has begun."""
        if self.step_begun:
            self.announce_all()
            return
        for unit, weights in enumerate(self._versions.of):
            if weights.lag:
                weights.lag = 0
                weights.edition += 1
                self._leases.outdate(unit)
                self._announce(unit)
                self._versions.show(unit)

    def announce_all(self) -> None:
        """Announce every update. What steps read stays the same."""
        for unit in range(len(self._versions.of)):
            self._announce(unit)

    def restored(self) -> None:
        """Every state has been replaced."""
        self.step_begun = False

    def _announce(self, unit: int) -> None:
        """From now on, accesses and other ranks wait for a unit's latest update, and other ranks' parts of it come."""
        weights = self._versions.of[unit]
        if weights.unannounced is not None:
            weights.announced = weights.unannounced.gradient
            self._updates.share(weights.unannounced)
            weights.unannounced = None
