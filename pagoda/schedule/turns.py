"""Asynchronous updates: after which steps a unit is updated, and which steps see the result.

With a bound of N steps, a unit is updated after every N-th step with the gradients of these N steps. PUBLISH shows the
new weights to accesses one step later. Units take turns, so each step updates about 1 / N of them. The version that a
step reads does not depend on when updates end, so ranks agree on it without a message.

Two things apply every gradient early. `settle` does so only in the states, so that they can be read from outside, and
changes nothing that steps read. A drain also shows the result, unless a step has begun, and turns begin anew. A
checkpoint settles and saves how late weights are (`Late`), so that a resumed run goes on as if nothing had happened.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pagoda.schedule.leases import Leases
from pagoda.schedule.operations import Kind, Operation, SchedulePlan
from pagoda.schedule.records import Late, Update
from pagoda.schedule.updates import UpdateSchedule
from pagoda.schedule.versions import Versions


@dataclass(eq=False, repr=False)
class Turns:
    """Starts asynchronous updates. Does nothing if updates are synchronous.

    Invariants: all accesses of a step see the same version of a unit; an update writes the extent that no step reads.
    """

    _plan: SchedulePlan
    _versions: Versions
    _leases: Leases
    _updates: UpdateSchedule
    _issue: Callable[[Operation], None]
    _turn: int = 0
    """The number of steps since the last drain."""
    step_begun: bool = False
    """Whether compute has used a unit in a step since the last `step()`."""

    def end_step(self) -> None:
        """`step()` has queued its updates."""
        self.step_begun = False
        self._turn += 1
        most = self._plan.max_staleness
        for unit in range(len(self._versions.of)) if most is not None else ():
            if most and (self._turn == 1 or (self._turn - 1 + unit) % most == 0):
                self._show(unit)
            if not most or (self._turn + unit) % most == 0:
                self._close(unit)
            if not most:
                self._show(unit)

    def drain(self) -> None:
        """Start updates with all gradients, and restart the turns."""
        self._turn = 0
        show = self._publish if self.step_begun else self._show
        for unit, weights in enumerate(self._versions.of):
            if weights.lag:
                show(unit)
                self._close(unit)
                show(unit)

    def settle(self) -> None:
        """Start updates with all gradients. What steps read stays the same."""
        for unit, weights in enumerate(self._versions.of):
            if weights.closed is not None:
                self._publish(unit)
            if weights.open:
                self._close(unit)
                self._publish(unit)

    def restored(self, turn: int) -> None:
        """Every state has been replaced, and with it the weights that lag."""
        self._turn, self.step_begun = turn, False
        for unit, weights in enumerate(self._versions.of):
            if weights.lag:
                self._publish(unit)

    @property
    def late(self) -> Late:
        """How late weights are, after `settle`."""
        lags = [weights.lag for weights in self._versions.of]
        return Late(self._turn, lags) if self._plan.max_staleness else Late()

    def _close(self, unit: int) -> None:
        """Start the update with all gradients that a unit has collected."""
        weights = self._versions.of[unit]
        if weights.open:
            records, weights.open = weights.open, []
            weights.closed = Update(unit, records, extent=1 - weights.front)
            self._updates.queue(weights.closed)

    def _show(self, unit: int) -> None:
        """From now on, accesses see all updates of a unit that have been requested."""
        weights = self._versions.of[unit]
        if weights.lag != len(weights.open):
            weights.lag = len(weights.open)
            weights.front = 1 - weights.front
            weights.edition += 1
            self._leases.changed(unit)
            self._publish(unit)

    def _publish(self, unit: int) -> None:
        """Announce which extent of a unit accesses read. The other ranks' parts of the latest update come now."""
        weights = self._versions.of[unit]
        if weights.closed is not None:
            weights.requested = weights.closed.records[-1]
            self._updates.share(weights.closed)
            weights.closed = None
        self._issue(Operation(Kind.PUBLISH, unit, version=weights.version, home=weights.front))
