"""Guesses: updates before `step()`, whose new states replace the old ones only once it has confirmed them."""

from dataclasses import dataclass, field

from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.plan.layout import WEIGHT
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


@dataclass(eq=False, repr=False)
class Guess:
    """An update of one unit that writes new states next to the old ones, until `confirm` or `revert`.

    States on SSD keep their old pages, while the update writes to other pages. States in memory have a second extent,
    which the update writes. So confirming and undoing move no bytes.
    """

    _store: Store
    record: UnitGradient
    updated: Handle = field(default_factory=Handle)
    """`updated` and `written` belong to this update. Those of the record belong to the update that is kept."""
    written: Handle = field(default_factory=Handle)
    over: Handle = field(default_factory=Handle)
    """Ends when only one version of the states is left."""
    _frozen: PageSnapshot | None = None
    """The old pages of states on SSD."""
    _confirmed: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self.extent = 1 - self._store.newest[self._unit]
        """The extent that it writes."""

    @property
    def _unit(self) -> int:
        return self.record.unit.index

    def begin(self) -> None:
        """The update is about to begin. No state of the unit is being stored."""
        runs = [self._store.run(self._unit, state.name) for state in self._store.plan.layout.states]
        if self._store.ssd is not None and any(runs):
            self._frozen = self._store.ssd.snapshot(awaited=False)
            for run in filter(None, runs):
                self._frozen.add(run)

    def confirm(self) -> None:
        """The new states are those of the unit from now on. The update may still be writing them. This is a part of an
        event, as is `end`."""
        self._store.front[self._unit] = self._store.newest[self._unit] = self.extent
        self.record.extent = self._store.extent(self._unit, WEIGHT, self.extent)
        self._confirmed = True
        self._poison_old()

    def end(self) -> None:
        """The update has ended, and reads the old states no longer."""
        self._ended = True
        self._poison_old()

    def close(self, _: BaseException | None) -> None:
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
