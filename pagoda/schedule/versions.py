"""The versions of each unit's weights, and the update that makes the next one.

A version is the number of steps whose gradients the weights contain.
"""

from collections.abc import Sequence

from pagoda.schedule.operations import SchedulePlan
from pagoda.schedule.records import GradientRecord, Update, UpdateState, Weights


class Versions:
    """The weights of every unit."""

    def __init__(self, plan: SchedulePlan) -> None:
        self._plan = plan
        self.of = [Weights() for _ in plan.units]
        """By unit."""
        self.restored()

    def restored(self, lags: Sequence[int] = ()) -> None:
        """Every state has been replaced, in all extents. `lags`: by unit, how far its weights lag, if any do. Accesses
        of these read the extent without the newest values."""
        for unit, before in enumerate(self.of):
            lag = lags[unit] if lags else 0
            front = 1 - before.extent if lag else before.front
            self.of[unit] = Weights(lag, lag, lag, front=front, extent=before.extent, edition=before.edition)
        self.failed = False
        """Whether an update has failed. States are then damaged until all are `restored`."""

    def readable(self, unit: int) -> int | None:
        """The version of a unit's weights that can be read now. None if an operation must end first."""
        weights = self.of[unit]
        return None if self.failed or weights.await_update else weights.version

    def fetchable(self, unit: int) -> int | None:
        """The version of a unit's weights for which a FETCH can be issued. If ranks must agree on fetches, it does not
        depend on whether the update has ended, because the FETCH waits for that."""
        return self.of[unit].version if self._plan.ranks_fetch_alike else self.readable(unit)

    def awaited(self, unit: int, version: int) -> GradientRecord | None:
        """The gradient whose update a FETCH of this version must wait for, if ranks must agree and the update, or other
        ranks' parts of it, have not ended. Otherwise None."""
        weights = self.of[unit]
        missing = version - weights.newest
        guess = weights.guess
        if guess is not None and guess.withdrawn and guess.has_written:  # `newest` includes it until it is undone
            missing += 1
        if missing == 0 and weights.sharing:
            return weights.sharing[-1].record
        if not self._plan.ranks_fetch_alike or missing <= 0 or weights.update is None:
            return None
        begun = [] if weights.update.has_written or weights.update is guess else [weights.update]
        return [*begun, *weights.later][missing - 1].record

    def undoing(self, unit: int) -> Update | None:
        """The speculative update of a unit that is being undone or will be."""
        guess = self.of[unit].guess
        return guess if guess is not None and guess.withdrawn else None

    def settled(self, unit: int) -> int | None:
        """The version of a unit's states. None while they change."""
        weights = self.of[unit]
        update = weights.update
        busy = update is not None and update.state in (UpdateState.RUNNING, UpdateState.UNDOING)
        return None if busy or any(each.has_written for each in weights.sharing) else weights.newest
