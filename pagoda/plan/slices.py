"""Slices: which elements of each unit, and of each of its states, each of the ranks that share it holds."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pagoda.optim.rule import StateSpec
from pagoda.plan.packed import Packed
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec, align


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a unit, or of a state of it, which lie from element `at` on in an extent."""

    start: int
    stop: int
    at: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, start: int, stop: int) -> "Span | None":
        """What of it lies in [start, stop) of the unit; None where nothing does."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Span(first, last, self.at + first - self.start) if first < last else None


class Slices:
    """The trainable elements of a unit in as many slices as ranks share it, by their place among those; its frozen
    elements are sliced apart, equally, so that the rank that updates an element has its weight.

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
        whole: int = ALIGN_ELEMENTS,
    ) -> None:
        """Equal slices are multiples of `whole` elements, but for the end of the last one."""
        self._units = units
        self._states = states
        self._packed = packed
        self._ranks = ranks
        self._experts = expert_units
        self._whole = whole
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
        return 0 if self._ranks is None else self._ranks.place(rank, unit.index in self._experts)

    def trained(self, unit: UnitSpec, place: int) -> Span:
        """The trainable elements of a unit that the rank at a place updates."""
        if self._takes_whole is None:
            return Span(*equal_slice(0, unit.trainable_numel, self.group(unit), place, self._whole_of(unit)))
        return Span(*self._of_wholes[0][unit.index][place])

    def frozen(self, unit: UnitSpec, place: int) -> Span:
        """The frozen elements of a unit that the rank at a place has, where each has a slice."""
        ends = equal_slice(unit.trainable_numel, unit.numel, self.group(unit), place)
        return Span(*ends, at=self.room(unit, place))

    def updated(self, unit: UnitSpec, rank: int) -> Span:
        """The trainable elements of a unit that a rank updates."""
        return self.trained(unit, self.place(unit, rank))

    def room(self, unit: UnitSpec, place: int) -> int:
        """Elements that extents have for a slice of the trainable ones: at least a block, so every rank has some."""
        if self._takes_whole is None:
            slice_of_it = slice_elements(unit.trainable_numel, self.group(unit), self._whole_of(unit))
            return min(slice_of_it, align(unit.trainable_numel))
        return max(len(self.trained(unit, place)), min(ALIGN_ELEMENTS, unit.trainable_numel))

    def spans(self, unit: UnitSpec, place: int, frozen: bool) -> tuple[Span, ...]:
        """What the rank at a place has of a unit where each has a slice; with `frozen`, of its frozen elements too."""
        spans = [self.trained(unit, place), *([self.frozen(unit, place)] if frozen else [])]
        return tuple(span for span in spans if len(span))

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

    def _whole_of(self, unit: UnitSpec) -> int:
        """What equal slices of a unit are multiples of."""
        return self._whole if self.group(unit) > 1 else ALIGN_ELEMENTS

    @property
    def fullest_rank(self) -> int:
        """The rank that holds most."""
        if not self.differ:
            return 0
        ranks = self._ranks
        assert ranks is not None
        _, dense, experts = self._of_wholes
        return max(
            range(ranks.count), key=lambda rank: dense[ranks.place(rank, False)] + experts[ranks.place(rank, True)]
        )

    @cached_property
    def _of_wholes(self) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
        """Of each unit, the slices of whole parameters, by place; and the bytes of all by place among those that share
        dense units, and units of experts."""
        by_unit = [whole_slices(self._atoms(unit), self.group(unit)) for unit in self._units]
        totals: list[list[int]] = []
        for experts in (False, True):
            alike = [unit for unit in self._units if (unit.index in self._experts) is experts]
            places = self._ranks.sharers(experts) if self._ranks is not None else 1
            sizes = [[self._nbytes(unit, Span(*ends)) for ends in by_unit[unit.index]] for unit in alike]
            chosen, total = balanced(sizes, places)
            for unit, numbers in zip(alike, chosen, strict=True):
                by_unit[unit.index] = [by_unit[unit.index][number] for number in numbers]
            totals.append(total)
        dense, of_experts = totals
        return by_unit, dense, of_experts

    def _nbytes(self, unit: UnitSpec, span: Span) -> int:
        """Bytes of all states of some trainable elements of a unit."""
        parts = ((state, part) for state in self._states for part in self.of_state(unit, state.name, (span,)))
        return sum(len(part) * state.dtype.itemsize for state, part in parts)

    def _atoms(self, unit: UnitSpec) -> list["Atom"]:
        """The trainable parameters of a unit."""
        assert self._takes_whole is not None
        trained = [slot for slot in unit.slots if slot.param.trainable]
        ends = [*(slot.offset for slot in trained), unit.trainable_numel][1:]
        return [
            Atom(slot.offset, end, self._takes_whole(slot.param.name, slot.param.shape))
            for slot, end in zip(trained, ends, strict=True)
        ]


def slice_elements(elements: int, group: int, whole: int = ALIGN_ELEMENTS) -> int:
    """Elements of each of `group` equal slices: a multiple of `whole`, by default the blocks that are quantized
    together."""
    return -(-elements // (group * whole)) * whole


def equal_slice(start: int, stop: int, group: int, index: int, whole: int = ALIGN_ELEMENTS) -> tuple[int, int]:
    """Slice number `index` of `group` equal ones of [start, stop). The last ones may be short or empty."""
    each = slice_elements(stop - start, group, whole)
    return min(start + index * each, stop), min(start + (index + 1) * each, stop)


@dataclass(frozen=True, slots=True)
class Atom:
    """The elements of a parameter, up to where the next one starts."""

    start: int
    stop: int
    whole: bool
    """Whether it must not be cut; others are cut into whole blocks."""


def whole_slices(atoms: Sequence[Atom], group: int) -> list[tuple[int, int]]:
    """`group` slices of adjoining atoms, which leave those whole that must be, the largest slice as small as can be.

    Some may be empty.
    """
    if not atoms:
        return [(0, 0)] * group
    total = atoms[-1].stop
    least = max([slice_elements(total, group), *(atom.stop - atom.start for atom in atoms if atom.whole)])
    sizes = range(least, total + 1, ALIGN_ELEMENTS)
    enough = bisect_left(sizes, True, key=lambda size: len(_filled(atoms, size)) <= group)
    slices = _filled(atoms, sizes[enough])
    return [*slices, *[(total, total)] * (group - len(slices))]


def _filled(atoms: Sequence[Atom], most: int) -> list[tuple[int, int]]:
    """Slices of at most `most` elements, which no whole atom exceeds, each as full as can be."""
    slices: list[tuple[int, int]] = []
    start = at = 0
    for atom in atoms:
        while atom.stop - start > most:
            at = at if atom.whole else start + most
            slices.append((start, at))
            start = at
        at = atom.stop
    return [*slices, (start, at)] if at > start else slices


def balanced(sizes: Sequence[Sequence[int]], holders: int) -> tuple[list[list[int]], list[int]]:
    """Which of its slices each holder gets of one thing after another, so that all get about as much in all.

    sizes: of each thing, those of its slices, one a holder. The largest goes to who has least.
    Returns, of each thing, the number of the slice by holder; and what each holder has of all.
    """
    held = [0] * holders
    chosen: list[list[int]] = []
    for of_thing in sizes:
        poorest = sorted(range(holders), key=lambda holder: held[holder])
        largest = sorted(range(holders), key=lambda number: -of_thing[number])
        by_holder = dict(zip(poorest, largest, strict=True))
        chosen.append([by_holder[holder] for holder in range(holders)])
        held = [before + of_thing[number] for before, number in zip(held, chosen[-1], strict=True)]
    return chosen, held
