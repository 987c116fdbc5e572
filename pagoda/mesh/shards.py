"""Shards: this rank's part of every unit, and the ranks that have the other parts."""

from pagoda.mesh.mesh import Mesh
from pagoda.plan.layout import WEIGHT, Layout
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec


class Shards:
    """Which rank has which elements of each unit."""

    def __init__(self, layout: Layout, mesh: Mesh) -> None:
        self._layout = layout
        self.slices = layout.slices
        self._mesh = mesh
        self.rank = self._mesh.rank
        self.copies = self._mesh.copies()
        """The ranks that have the same slices as this one, one in each replica."""
        self._sharers = {unit.index: self._mesh.sharers(self._is_expert(unit)) for unit in layout.units}
        self._updated = {unit.index: self.slices.updated(unit, self.rank) for unit in layout.units}

    def sharers(self, unit: UnitSpec) -> tuple[int, ...]:
        """The ranks that have the slices of a unit, by place."""
        return self._sharers[unit.index]

    def family(self, unit: UnitSpec) -> frozenset[int]:
        """The ranks that have a slice of any copy of a unit."""
        return frozenset(self._mesh.family(self._is_expert(unit)))

    def having(self, unit: UnitSpec, slot: int) -> tuple[int, ...]:
        """The ranks that have the same parameter, or the same part of it, as this one."""
        if unit.slots[slot].param.shard is None and not self._is_expert(unit):
            return tuple(range(self._mesh.size))
        return tuple(sorted(self.family(unit)))

    def writes(self, unit: UnitSpec, slot: int) -> bool:
        """Whether this rank writes its `responsible` elements of a parameter. If tensor-parallel ranks each have the
        whole parameter, only the first writes."""
        return self._mesh.tensor_index == 0 or unit.slots[slot].param.shard is not None

    def counts(self, unit: UnitSpec, slot: int) -> bool:
        """Whether a norm counts this rank's elements of a parameter, and not another rank's copy of them."""
        return self.writes(unit, slot) and self.copies[0] == self.rank

    def is_sliced(self, unit: UnitSpec, state: str) -> bool:
        """Whether each rank has a slice of a unit's state, and not all of it."""
        return self._layout.is_sliced(unit, state)

    def spans(self, unit: UnitSpec, state: str, rank: int | None = None) -> tuple[Span, ...]:
        """The elements of a unit in a rank's extent of a state. The default is this rank."""
        frozen = state == WEIGHT
        if not self.is_sliced(unit, state):
            return (Span(0, unit.numel if frozen else unit.trainable_numel),)
        return self.slices.spans(unit, self.slices.place(unit, self.rank if rank is None else rank), frozen)

    def trained_slices(self, unit: UnitSpec) -> list[Span]:
        """The trainable elements of a unit that each sharer updates, by place."""
        return [self.slices.trained(unit, place) for place in range(len(self.sharers(unit)))]

    def frozen_slices(self, unit: UnitSpec) -> list[Span]:
        """The frozen elements of a unit that each sharer has, by place, if ranks have slices of the weights."""
        return [self.slices.frozen(unit, place) for place in range(len(self.sharers(unit)))]

    def held(self, unit: UnitSpec, state: str, rank: int | None = None) -> tuple[Span, ...]:
        """Like `spans`, in elements of the state. These differ from the unit's elements if the state has its own
        shapes."""
        if not self._layout.has(unit, state):
            return ()
        return self.slices.of_state(unit, state, self.spans(unit, state, rank))

    def responsible(self, unit: UnitSpec, state: str) -> tuple[Span, ...]:
        """The part of a state that only this rank writes to a checkpoint, in elements of the state: its slice, even if
        it has the whole state. Empty if a rank of another replica writes it."""
        if self.copies[0] != self.rank or not self._layout.has(unit, state):
            return ()
        spans = self.slices.spans(unit, self.slices.place(unit, self.rank), frozen=state == WEIGHT)
        if not self.is_sliced(unit, state):
            spans = tuple(Span(span.start, span.stop, span.start) for span in spans)
        return self.slices.of_state(unit, state, spans)

    def updated(self, unit: UnitSpec) -> Span:
        """The trainable elements that this rank updates. `at` is the position of their moments."""
        return self._updated[unit.index]

    def origin(self, unit: UnitSpec, state: str) -> int:
        """The position, in this rank's extent of a state, of the first element that it updates. Not for states with
        their own shapes."""
        return 0 if self.is_sliced(unit, state) else self.updated(unit).start

    def _is_expert(self, unit: UnitSpec) -> bool:
        """Whether a unit belongs to experts, so that only some ranks share its state."""
        return unit.index in self._layout.expert_units
