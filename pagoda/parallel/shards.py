"""Shards: this rank's part of every unit, and the ranks that have the others."""

from pagoda.parallel.mesh import Mesh
from pagoda.plan.layout import WEIGHT, Layout
from pagoda.plan.shards import Span, slice_spans
from pagoda.plan.units import UnitSpec


class Shards:
    """Where the elements of each unit lie, by rank; without a mesh, all of them are here.

    Spans count a unit's elements, also for states with one element for many of them.
    """

    def __init__(self, layout: Layout, mesh: Mesh | None) -> None:
        self._layout = layout
        self._mesh = mesh
        self.rank = mesh.rank if mesh is not None else 0
        self._sharers = {unit.index: self._find_sharers(unit) for unit in layout.units}
        self._updated: dict[tuple[int, int], Span] = {}
        """(unit, rank) -> what the rank updates of it."""

    def sharers(self, unit: UnitSpec) -> tuple[int, ...]:
        """Ranks that have the slices of a unit, in the order of the slices."""
        return self._sharers[unit.index]

    def copies(self, unit: UnitSpec) -> tuple[int, ...]:
        """Ranks that have the same slice of a unit as this one."""
        if self._mesh is None:
            return (0,)
        return self._mesh.copies(expert=unit.index in self._layout.expert_units)

    def family(self, unit: UnitSpec) -> frozenset[int]:
        """Ranks that have a slice of a unit, of any copy of it."""
        if self._mesh is None or unit.index in self._layout.expert_units:
            return frozenset(self.sharers(unit))
        return frozenset(range(self._mesh.size))

    def is_cut(self, unit: UnitSpec, state: str) -> bool:
        """Whether ranks have slices of a state of a unit, not all of it each."""
        return len(self._sharers[unit.index]) > 1 and self._layout.is_sliced(state)

    def spans(self, unit: UnitSpec, state: str, rank: int | None = None) -> tuple[Span, ...]:
        """What a rank's extent of a state holds, this one's by default."""
        frozen = state == WEIGHT
        if not self.is_cut(unit, state):
            return (Span(0, unit.numel if frozen else unit.trainable_numel),)
        return slice_spans(unit, len(self.sharers(unit)), self._index(unit, rank), frozen)

    def responsible(self, unit: UnitSpec, state: str) -> tuple[Span, ...]:
        """What this rank alone writes of a state into a checkpoint: its slice, also where it has all of it.

        Nothing where another replica's rank does.
        """
        if self.copies(unit)[0] != self.rank:
            return ()
        spans = slice_spans(unit, len(self.sharers(unit)), self._index(unit, None), frozen=state == WEIGHT)
        if self.is_cut(unit, state):
            return spans
        return tuple(Span(span.start, span.stop, span.start) for span in spans)

    def updated(self, unit: UnitSpec, rank: int | None = None) -> Span:
        """The trainable elements that a rank updates, this one by default; `at` is where their moments lie."""
        key = unit.index, self.rank if rank is None else rank
        known = self._updated.get(key)
        if known is None:
            spans = slice_spans(unit, len(self.sharers(unit)), self._index(unit, rank), frozen=False)
            known = self._updated[key] = spans[0] if spans else Span(0, 0)
        return known

    def origin(self, unit: UnitSpec, state: str) -> int:
        """Element of an extent of this rank at which what it updates begins."""
        return 0 if self.is_cut(unit, state) else self.updated(unit).start

    def _index(self, unit: UnitSpec, rank: int | None) -> int:
        """Number of the slice of a unit that a rank has."""
        return self.sharers(unit).index(self.rank if rank is None else rank)

    def _find_sharers(self, unit: UnitSpec) -> tuple[int, ...]:
        if self._mesh is None:
            return (0,)
        return self._mesh.sharers(expert=unit.index in self._layout.expert_units)
