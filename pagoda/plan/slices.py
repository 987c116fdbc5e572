"""Slices: which elements of each unit, and of each of its states, each of the ranks that share it holds."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from pagoda.optim.rule import StateSpec
from pagoda.plan.packed import Packed
from pagoda.plan.ranks import Ranks
from pagoda.plan.shards import Atom, Span, balanced, equal_slice, slice_elements, whole_slices
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec


class Slices:
    """The trainable elements of a unit in as many slices as ranks share it, by their place among those; its frozen
    elements are sliced apart, equally, so that whoever updates an element has its weight.

    Slices are equal where the update may cut parameters anywhere. Where it takes them whole, a slice is whole
    parameters, adjoining ones, the largest slice as small as that allows; who gets which is balanced over all units, so
    every rank has a share of the state that is equal up to a parameter or so.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        states: Sequence[StateSpec],
        packed: Mapping[str, Packed],
        ranks: Ranks | None,
        expert_units: frozenset[int],
        is_sliced: Callable[[str], bool],
    ) -> None:
        """`is_sliced` says whether ranks have slices of a state, not all of it each."""
        self._units = units
        self._states = states
        self._packed = packed
        self._ranks = ranks
        self._experts = expert_units
        self._is_sliced = is_sliced
        self._takes_whole = states[0].whole

    @property
    def differ(self) -> bool:
        """Whether ranks may hold other numbers of elements than each other."""
        return self._takes_whole is not None and self._ranks is not None and self._ranks.data_parallel > 1

    def group(self, unit: UnitSpec) -> int:
        """Ranks that share the state of a unit."""
        return 1 if self._ranks is None else self._ranks.sharers(unit.index in self._experts)

    def place(self, unit: UnitSpec, rank: int) -> int:
        """A rank's place among those that share a unit."""
        if self._ranks is None:
            return 0
        if unit.index in self._experts:
            return rank // self._ranks.expert_parallel
        each = 1 if self._ranks is None else self._ranks.tensor_parallel
        return rank // each % self.group(unit)

    def trained(self, unit: UnitSpec, place: int) -> Span:
        """The trainable elements of a unit that the rank at a place updates."""
        if self._takes_whole is None:
            return Span(*equal_slice(0, unit.trainable_numel, self.group(unit), place))
        return Span(*self._of_wholes[0][unit.index][place])

    def room(self, unit: UnitSpec, place: int) -> int:
        """Elements that extents have for a slice of the trainable ones: at least a block, so every rank has some."""
        if self._takes_whole is None:
            return slice_elements(unit.trainable_numel, self.group(unit))
        return max(len(self.trained(unit, place)), min(ALIGN_ELEMENTS, unit.trainable_numel))

    def spans(self, unit: UnitSpec, place: int, frozen: bool) -> tuple[Span, ...]:
        """What the rank at a place has of a unit where each has a slice; with `frozen`, of its frozen elements too."""
        spans = [self.trained(unit, place)]
        if frozen:
            others = equal_slice(unit.trainable_numel, unit.numel, self.group(unit), place)
            spans.append(Span(*others, at=self.room(unit, place)))
        return tuple(span for span in spans if len(span))

    def is_cut(self, unit: UnitSpec, state: str) -> bool:
        """Whether ranks have slices of a state of a unit, not all of it each."""
        return self.group(unit) > 1 and self._is_sliced(state)

    def of_state(self, unit: UnitSpec, state: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Spans of a unit's elements as those of one of its states."""
        packed = self._packed.get(state)
        if packed is None:
            per = next((s.per for s in self._states if s.name == state), 1)
            return tuple(Span(-(-span.start // per), -(-span.stop // per), span.at // per) for span in spans)
        found = []
        for span in spans:
            start, stop = packed.before(unit, span.start), packed.before(unit, span.stop)
            found.append(Span(start, stop, start - packed.before(unit, span.start - span.at)))
        return tuple(span for span in found if len(span))

    def nbytes(self, unit: UnitSpec, span: Span) -> int:
        """Bytes of all states of some trainable elements of a unit."""
        if not len(span):
            return 0
        return sum(
            len(part) * state.dtype.itemsize
            for state in self._states
            for part in self.of_state(unit, state.name, (span,))
        )

    @property
    def fullest_rank(self) -> int:
        """The rank that holds most."""
        if not self.differ:
            return 0
        assert self._ranks is not None
        _, dense, experts = self._of_wholes
        apart = self._ranks.expert_parallel
        held = [dense[r % len(dense)] + experts[r // apart] for r in range(self._ranks.data_parallel)]
        return held.index(max(held))

    @cached_property
    def _of_wholes(self) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
        """Of each unit, the slices of whole parameters, by place; and the bytes of all by place among those that share
        dense units, and units of experts."""
        by_unit = [whole_slices(self._atoms(unit), self.group(unit)) for unit in self._units]
        totals: list[list[int]] = []
        for experts in (False, True):
            alike = [unit for unit in self._units if (unit.index in self._experts) is experts]
            places = self._ranks.sharers(experts) if self._ranks is not None else 1
            sizes = [[self.nbytes(unit, Span(*ends)) for ends in by_unit[unit.index]] for unit in alike]
            chosen, total = balanced(sizes, places)
            for unit, numbers in zip(alike, chosen, strict=True):
                by_unit[unit.index] = [by_unit[unit.index][number] for number in numbers]
            totals.append(total)
        dense, of_experts = totals
        return by_unit, dense, of_experts

    def _atoms(self, unit: UnitSpec) -> list[Atom]:
        """The trainable parameters of a unit."""
        assert self._takes_whole is not None
        trained = [slot for slot in unit.slots if slot.param.trainable]
        ends = [*(slot.offset for slot in trained[1:]), unit.trainable_numel] if trained else []
        return [
            Atom(slot.offset, end, self._takes_whole(slot.param.name, slot.param.shape))
            for slot, end in zip(trained, ends, strict=True)
        ]
