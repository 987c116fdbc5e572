"""Guesses: updates that may have to be undone, with the old states of their units."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagoda.memory.arena import copy_bytes
from pagoda.memory.ssd.tier import PageSnapshot
from pagoda.plan.layout import before
from pagoda.runtime.gradients import UnitGradient
from pagoda.runtime.lanes import Handle
from pagoda.runtime.store import Store


@dataclass(eq=False, repr=False)
class Guess:
    """An update of one unit whose old states are kept next to the new ones, until it has ended and `close` or `revert`
    is called.

    States on SSD keep their old pages, while the update writes to other pages. States in RAM are copied, block by
    block, just before they change. The update calls `begin` and `save` on its threads.
    """

    _store: Store
    record: UnitGradient
    updated: Handle = field(default_factory=Handle)
    """`updated` and `written` belong to this update. Those of the record belong to the update that is kept."""
    written: Handle = field(default_factory=Handle)
    over: Handle = field(default_factory=Handle)
    """Ends when the unit has its old states back, or when they are given up."""
    _frozen: PageSnapshot | None = None
    """The old pages of states on SSD."""
    _saved: list[tuple[str, range]] = field(default_factory=list)
    """Each copied part: the state, and the elements of its extent."""

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

    def save(self, changing: Mapping[str, range]) -> None:
        """These elements of the unit's extents, by state, are about to change."""
        for state, elements in changing.items():
            if self._store.tensor(self._unit, state) is not None:
                self._copy(state, before(state), elements)
                self._saved.append((state, elements))

    def close(self, _: BaseException | None) -> None:
        """Keep the update and give up the old states."""
        if self._frozen is not None:
            self._frozen.close()
        self.over.finish()

    def revert(self) -> None:
        """Restore the old states."""
        if self._frozen is not None:
            self._frozen.restore()
        for state, elements in self._saved:
            self._copy(before(state), state, elements)

    def _copy(self, source: str, target: str, elements: range) -> None:
        read, write = self._store.tensor(self._unit, source), self._store.tensor(self._unit, target)
        assert read is not None
        assert write is not None
        copy_bytes(write[elements.start : elements.stop], read[elements.start : elements.stop])
