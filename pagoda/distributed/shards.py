"""Shards: this rank's part of every unit, and the ranks that have the others."""

from pagoda.distributed.mesh import Mesh
from pagoda.distributed.world import World
from pagoda.plan.layout import WEIGHT, Layout
from pagoda.plan.ranks import Ranks
from pagoda.plan.slices import Span
from pagoda.plan.units import UnitSpec


class Shards:
    """Where the elements of each unit lie, by rank; without a mesh, all of them are here."""

    def __init__(self, layout: Layout, mesh: Mesh | None) -> None:
        self._layout = layout
        self._slices = layout.slices
        self._mesh = mesh or Mesh(World(), Ranks(1, 1))
        self.rank = self._mesh.rank
        self.copies = self._mesh.copies()
        """Ranks that have the same slices as this one."""
        self._sharers = {unit.index: self._mesh.sharers(self._is_expert(unit)) for unit in layout.units}
        self._updated: dict[tuple[int, int], Span] = {}
        """(unit, rank) -> what the rank updates of it."""

    def sharers(self, unit: UnitSpec) -> tuple[int, ...]:
        """Ranks that have the slices of a unit, by their place there."""
        return self._sharers[unit.index]

    def family(self, unit: UnitSpec) -> frozenset[int]:
        """Ranks that have a slice of a unit, of any copy of it."""
        return frozenset(self._mesh.family(self._is_expert(unit)))

    def having(self, unit: UnitSpec, slot: int) -> tuple[int, ...]:
        """Ranks that have the same parameter, or the same part of it."""
        if unit.slots[slot].param.shard is None and not self._is_expert(unit):
            return tuple(range(self._mesh.size))
        return tuple(sorted(self.family(unit)))

    def writes(self, unit: UnitSpec, slot: int) -> bool:
        """Whether this rank writes what `responsible` says of a parameter: of those that tensor-parallel ranks have
        whole, the first does."""
        return self._mesh.tensor_index == 0 or unit.slots[slot].param.shard is not None

    def counts(self, unit: UnitSpec, slot: int) -> bool:
        """Whether this rank's elements of a parameter are those of their copies that a norm counts."""
        return self.writes(unit, slot) and self.copies[0] == self.rank

    def is_cut(self, unit: UnitSpec, state: str) -> bool:
        """Whether ranks have slices of a state of a unit, not all of it each."""
        return self._layout.is_cut(unit, state)

    def spans(self, unit: UnitSpec, state: str, rank: int | None = None) -> tuple[Span, ...]:
        """The elements of a unit that a rank's extent of a state is for, this one's by default."""
        frozen = state == WEIGHT
        if not self.is_cut(unit, state):
            return (Span(0, unit.numel if frozen else unit.trainable_numel),)
        return self._slices.spans(unit, self._place(unit, rank), frozen)

    @property
    def differ(self) -> bool:
        """Whether slices have sizes of their own, as whole parameters have."""
        return self._slices.differ

    def trained_slices(self, unit: UnitSpec) -> list[Span]:
        """The trainable elements of a unit that each sharer updates, by place."""
        return [self._slices.trained(unit, place) for place in range(len(self.sharers(unit)))]

    def frozen_slices(self, unit: UnitSpec) -> list[Span]:
        """The frozen elements of a unit that each sharer has, by place, where ranks have slices of the weights."""
        return [self._slices.frozen(unit, place) for place in range(len(self.sharers(unit)))]

    def held(self, unit: UnitSpec, state: str, rank: int | None = None) -> tuple[Span, ...]:
        """As `spans`, in elements of the state, which are fewer or others where it has shapes of its own."""
        return self._slices.of_state(unit, state, self.spans(unit, state, rank))

    def responsible(self, unit: UnitSpec, state: str) -> tuple[Span, ...]:
        """What this rank alone writes of a state into a checkpoint, in elements of the state: its slice, also where it
        has all of it. Nothing where another replica's rank does.
        """
        if self.copies[0] != self.rank:
            return ()
        spans = self._slices.spans(unit, self._place(unit, None), frozen=state == WEIGHT)
        if not self.is_cut(unit, state):
            spans = tuple(Span(span.start, span.stop, span.start) for span in spans)
        return self._slices.of_state(unit, state, spans)

    def updated(self, unit: UnitSpec, rank: int | None = None) -> Span:
        """The trainable elements that a rank updates, this one by default; `at` is where their moments lie."""
        key = unit.index, self.rank if rank is None else rank
        known = self._updated.get(key)
        if known is None:
            known = self._updated[key] = self._slices.trained(unit, self._place(unit, rank))
        return known

    def origin(self, unit: UnitSpec, state: str) -> int:
        """Element of an extent of this rank at which what it updates begins; not for states of other shapes."""
        return 0 if self.is_cut(unit, state) else self.updated(unit).start

    def _place(self, unit: UnitSpec, rank: int | None) -> int:
        """Place of a rank among the sharers of a unit."""
        return self.sharers(unit).index(self.rank if rank is None else rank)

    def _is_expert(self, unit: UnitSpec) -> bool:
        """Whether it is a unit of experts, whose state only some of the ranks share."""
        return unit.index in self._layout.expert_units
