"""Guesses: speculative updates, begun before `step()`. If it confirms one, the new states replace the old ones."""

from dataclasses import dataclass, field

from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


@dataclass(eq=False, repr=False)
class Guess:
    """An update of one unit that writes new states next to the old ones, until `confirm` or `revert`.

    Of states on SSD, the old pages are kept while the update writes to other pages. States in memory have a second
    extent, to which the update writes. So confirming and reverting move no bytes.
    """

    _store: Store
    gradient: UnitGradient
    extent: int
    """Number of the extent to which the update writes."""
    updated: Handle = field(default_factory=Handle)
    """`updated` and `written` are this update's. Those of `gradient` end with the update that `step()` keeps."""
    written: Handle = field(default_factory=Handle)
    over: Handle = field(default_factory=Handle)
    """Ends when only the old or only the new states are left."""
    _frozen: PageSnapshot | None = None
    """The old pages of states on SSD."""
    _confirmed: bool = False
    _ended: bool = False

    @property
    def _unit(self) -> int:
        return self.gradient.unit.index

    def begin(self) -> None:
        """Keep the old pages on SSD. Call it before the update begins, while no state of the unit is being stored."""
        runs = [self._store.run(self._unit, state.name) for state in self._store.plan.layout.states]
        if self._store.ssd is not None and any(runs):
            self._frozen = self._store.ssd.snapshot(awaited=False)
            for run in filter(None, runs):
                self._frozen.add(run)

    def confirm(self) -> None:
        """From now on, the new states are the unit's. The update may still be writing them. Call this and `end` inside
        an event of the scheduler."""
        self._confirmed = True
        self._poison_old()

    def end(self) -> None:
        """The update has ended, and no longer reads the old states."""
        self._ended = True
        self._poison_old()

    def close(self) -> None:
        """Give up the old pages on SSD, once the confirmed update has ended."""
        if self._frozen is not None:
            self._frozen.close()
        self.over.finish()

    def revert(self) -> None:
        """Give up the new states, once the update has ended."""
        if self._frozen is not None:
            self._frozen.restore()
        self._store.poison(self._unit, self.extent)

    def _poison_old(self) -> None:
        if self._confirmed and self._ended:
            self._store.poison(self._unit, 1 - self.extent)
