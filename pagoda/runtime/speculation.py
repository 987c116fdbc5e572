"""Speculation: updates under backward as if nothing will be clipped, which `step()` lets stand or has undone."""

from collections.abc import Callable, Collection, Sequence

from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.saver import Saver
from pagoda.runtime.segments import Segment
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import Update, Updater

CALM_STEPS = 4
"""After a step that was clipped, as many in a row must not have been before the next speculation."""


class Speculation:
    """The updates of this step that were begun before it was known whether they are those that `step()` asks for.

    Until then nothing but their blocks may show: step counts, hyperparameters and gradients are as if nothing had been
    updated, and whoever asks for a unit's states has its update undone first. An update stands if, element for
    element, it is the one that `step()` would queue; else it is undone, and that one is queued. So neither a wrong
    guess nor anything that the user does in between can change a bit.

    Nothing is begun while recent steps were clipped, and while a checkpoint is being written, whose pages are spared
    for. Only the compute thread calls this class.
    """

    def __init__(
        self,
        units: Collection[int],
        gradients: Gradients,
        updater: Updater | None,
        saver: Saver,
        end_lease: Callable[[LiveUnit], None],
    ) -> None:
        """`units` are those that there is room to undo: none with asynchronous updates, whose `updater` is None.

        `end_lease` is told of units whose weights are about to be others, or are so.
        """
        self._units = units
        self._gradients = gradients
        self._updater = updater
        self._saver = saver
        self._end_lease = end_lease
        self._open: dict[int, Update] = {}
        """unit -> its update, neither kept nor undone."""
        self._calm = CALM_STEPS
        """Steps since one was clipped."""
        self._kept = self._undone = 0

    def may_begin(self, unit: LiveUnit) -> bool:
        """Whether an update of a unit may begin now."""
        if unit.index not in self._units or unit.index in self._open:
            return False
        return self._calm >= CALM_STEPS and not self._saver.pending

    def begin(self, record: UnitGradient, segments: Sequence[Segment], urgency: float) -> None:
        """Queue a unit's update, for the gradient and the hyperparameters that are there now; none without elements."""
        if not segments:
            return
        assert self._updater is not None
        self._gradients.lend(record)
        self._open[record.unit.index] = self._updater.speculate(record, segments, urgency)
        self._end_lease(record.unit)

    def confirm(self, record: UnitGradient, segments: Sequence[Segment]) -> Handle | None:
        """Keep a unit's update, if it is the one that `segments` say; else undo it, if it was begun.

        The handle ends when its new weights can be used.
        """
        update = self._open.get(record.unit.index)
        if update is None:
            return None
        failed = update.written.done and not update.written.succeeded
        if failed or update.segments != tuple(segments):
            self.undo(record.unit)
            self._calm = 0
            return None
        del self._open[record.unit.index]
        assert update.undo is not None
        assert self._updater is not None
        self._updater.stands(update)
        self._gradients.keep(record)
        update.undo.keep()
        self._kept += 1
        return update.published

    def undo(self, unit: LiveUnit) -> None:
        """Have a unit's states as the last `step()` left them. An error of the update is forgotten: whatever caused it
        will show again.
        """
        update = self._open.pop(unit.index, None)
        if update is None:
            return
        assert self._updater is not None
        self._updater.withdraw(update)
        update.written.wait_until_done()
        self._updater.undo(update)
        self._end_lease(unit)
        self._undone += 1

    def undo_all(self) -> None:
        """Undo every update that has not been kept."""
        updates = list(self._open.values())
        for update in updates:
            assert self._updater is not None
            self._updater.withdraw(update)
        for update in updates:
            self.undo(update.record.unit)

    def end_of_step(self, clipped: bool) -> None:
        """A step has taken all gradients."""
        self._calm = 0 if clipped else self._calm + 1

    def take_counts(self) -> tuple[int, int]:
        """Units whose update was kept, and undone, since the last call."""
        counts = self._kept, self._undone
        self._kept = self._undone = 0
        return counts
