"""Slices: the elements of each unit, and of each of its states, that each of the ranks sharing it holds."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pagoda.optim.rule import StateSpec
from pagoda.plan.packed import Packed
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec, align


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a unit or of one of its states. In an extent, they begin at element `at`."""

    start: int
    stop: int
    at: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def within(self, start: int, stop: int) -> "Span | None":
        """The part in [start, stop) of the unit, or None if there is none."""
        first, last = max(start, self.start), min(stop, self.stop)
        return Span(first, last, self.at + first - self.start) if first < last else None


class Slices:
    """Divides the trainable elements of each unit into slices, one for each rank that shares it. Frozen elements are
    divided separately into equal slices, so that the rank that updates an element has its weight.

    If the update may cut parameters anywhere, slices are equal. If it takes some parameters whole, no slice cuts these,
    and the largest slice is as small as possible. The slices are assigned so that, over all units, every rank has about
    equally much state.
    """

    def __init__(
        self,
        units: Sequence[UnitSpec],
        states_of: Callable[[UnitSpec], Sequence[StateSpec]],
        packed: Mapping[str, Packed],
        ranks: Ranks,
        expert_units: frozenset[int],
        page_bytes: int | None,
    ) -> None:
        """Equal slices are whole pages of weights, except at the end of the last one, if `page_bytes` is given."""
        self._units = units
        self._states_of = states_of
        self._packed = packed
        self._ranks = ranks
        self._experts = expert_units
        self._page_bytes = page_bytes
        self._takes_whole = states_of(units[0])[0].whole

    @property
    def differ(self) -> bool:
        """Whether ranks may hold different numbers of elements."""
        return self._takes_whole is not None and self._ranks.data_parallel > 1

    def group(self, unit: UnitSpec) -> int:
        """Number of ranks that share the state of a unit."""
        return self._ranks.sharers(unit.index in self._experts)

    def place(self, unit: UnitSpec, rank: int) -> int:
        """A rank's place among the ranks that share a unit."""
        return self._ranks.place(rank, unit.index in self._experts)

    def trained(self, unit: UnitSpec, place: int) -> Span:
        """The trainable elements of a unit that the rank at a place updates."""
        if self._takes_whole is None:
            return Span(*equal_slice(0, unit.trainable_numel, self.group(unit), place, self._multiple_of(unit)))
        return Span(*self._of_wholes[0][unit.index][place])

    def frozen(self, unit: UnitSpec, place: int) -> Span:
        """The frozen elements of a unit that the rank at a place has, if weights are divided."""
        ends = equal_slice(unit.trainable_numel, unit.numel, self.group(unit), place)
        return Span(*ends, at=self.room(unit, place))

    def updated(self, unit: UnitSpec, rank: int) -> Span:
        """The trainable elements of a unit that a rank updates."""
        return self.trained(unit, self.place(unit, rank))

    def room(self, unit: UnitSpec, place: int) -> int:
        """Elements that extents have for a slice of trainable elements: at least a block, so that every rank has
        some."""
        if self._takes_whole is None:
            slice_of_it = slice_elements(unit.trainable_numel, self.group(unit), self._multiple_of(unit))
            return min(slice_of_it, align(unit.trainable_numel))
        return max(len(self.trained(unit, place)), min(ALIGN_ELEMENTS, unit.trainable_numel))

    def spans(self, unit: UnitSpec, place: int, frozen: bool) -> tuple[Span, ...]:
        """The elements of a unit that the rank at a place has, if the unit is divided. `frozen`: include frozen
        elements."""
        spans = [self.trained(unit, place), *([self.frozen(unit, place)] if frozen else [])]
        return tuple(span for span in spans if len(span))

    def of_state(self, unit: UnitSpec, state: str, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Convert spans of a unit's elements to spans of one of its states."""
        packed = self._packed.get(state)
        if packed is None:
            per = next((s.per for s in self._states_of(unit) if s.name == state), 1)
            return tuple(Span(-(-span.start // per), -(-span.stop // per), span.at // per) for span in spans)
        found = []
        for span in spans:
            start, stop = packed.before(unit, span.start), packed.before(unit, span.stop)
            found.append(Span(start, stop, start - packed.before(unit, span.start - span.at)))
        return tuple(span for span in found if len(span))

    def _multiple_of(self, unit: UnitSpec) -> int:
        """Equal slices of a unit are multiples of this number of elements."""
        if self._page_bytes is None or self.group(unit) == 1:
            return ALIGN_ELEMENTS
        return self._page_bytes // self._states_of(unit)[0].dtype.itemsize

    @property
    def fullest_rank(self) -> int:
        """The rank that holds most."""
        if not self.differ:
            return 0
        ranks = self._ranks
        _, dense, experts = self._of_wholes
        return max(
            range(ranks.count), key=lambda rank: dense[ranks.place(rank, False)] + experts[ranks.place(rank, True)]
        )

    @cached_property
    def _of_wholes(self) -> tuple[list[list[tuple[int, int]]], list[int], list[int]]:
        """The slices of whole parameters of each unit, by place; and the bytes of all slices by place among the ranks
        that share dense units, and units of experts."""
        by_unit = [whole_slices(self._parameters(unit), self.group(unit)) for unit in self._units]
        totals: list[list[int]] = []
        for experts in (False, True):
            alike = [unit for unit in self._units if (unit.index in self._experts) is experts]
            sizes = [[self._nbytes(unit, Span(*ends)) for ends in by_unit[unit.index]] for unit in alike]
            chosen, total = balanced(sizes, self._ranks.sharers(experts))
            for unit, numbers in zip(alike, chosen, strict=True):
                by_unit[unit.index] = [by_unit[unit.index][number] for number in numbers]
            totals.append(total)
        dense, of_experts = totals
        return by_unit, dense, of_experts

    def _nbytes(self, unit: UnitSpec, span: Span) -> int:
        """Bytes of all states of some trainable elements of a unit."""
        parts = ((state, part) for state in self._states_of(unit) for part in self.of_state(unit, state.name, (span,)))
        return sum(len(part) * state.dtype.itemsize for state, part in parts)

    def _parameters(self, unit: UnitSpec) -> list["ParameterRange"]:
        """The trainable parameters of a unit."""
        assert self._takes_whole is not None
        trained = [slot for slot in unit.slots if slot.param.trainable]
        ends = [*(slot.offset for slot in trained), unit.trainable_numel][1:]
        return [
            ParameterRange(slot.offset, end, self._takes_whole(slot.param.name, slot.param.shape))
            for slot, end in zip(trained, ends, strict=True)
        ]


def slice_elements(elements: int, group: int, multiple: int = ALIGN_ELEMENTS) -> int:
    """Elements of each of `group` equal slices: a multiple of `multiple`, by default of a block that is quantized
    together."""
    return -(-elements // (group * multiple)) * multiple


def equal_slice(start: int, stop: int, group: int, index: int, multiple: int = ALIGN_ELEMENTS) -> tuple[int, int]:
    """Slice number `index` of `group` equal slices of [start, stop). The last ones may be short or empty."""
    each = slice_elements(stop - start, group, multiple)
    return min(start + index * each, stop), min(start + (index + 1) * each, stop)


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """The elements of a parameter, up to the start of the next one."""

    start: int
    stop: int
    whole: bool
    """Whether it must not be cut. Others are cut into whole blocks."""


def whole_slices(parameters: Sequence[ParameterRange], group: int) -> list[tuple[int, int]]:
    """Divide adjoining parameters into `group` slices, so that the largest slice is as small as possible. Parameters
    that are `whole` are not cut.

    Some slices may be empty.
    """
    if not parameters:
        return [(0, 0)] * group
    total = parameters[-1].stop
    least = max([slice_elements(total, group), *(each.stop - each.start for each in parameters if each.whole)])
    sizes = range(least, total + 1, ALIGN_ELEMENTS)
    enough = bisect_left(sizes, True, key=lambda size: len(_filled(parameters, size)) <= group)
    slices = _filled(parameters, sizes[enough])
    return [*slices, *[(total, total)] * (group - len(slices))]


def _filled(parameters: Sequence[ParameterRange], most: int) -> list[tuple[int, int]]:
    """Slices of at most `most` elements, each as full as possible. No parameter that is `whole` is larger."""
    slices: list[tuple[int, int]] = []
    start = at = 0
    for parameter in parameters:
        while parameter.stop - start > most:
            at = at if parameter.whole else start + most
            slices.append((start, at))
            start = at
        at = parameter.stop
    return [*slices, (start, at)] if at > start else slices


def balanced(sizes: Sequence[Sequence[int]], holders: int) -> tuple[list[list[int]], list[int]]:
    """Assign the slices of several things to holders so that all hold about equally much.

    sizes: for each thing, the sizes of its slices, one per holder. The largest slice goes to the holder with the least.
    Returns, for each thing, the number of the slice of each holder; and the total of each holder.
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
