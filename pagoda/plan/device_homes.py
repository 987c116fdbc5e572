"""Decides which states of which units live on a separate device."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from pagoda.plan.collective import reduce_buffers
from pagoda.plan.device_updates import on_device
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT, WEIGHT_BACK, Layout
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.units import UnitSpec


@dataclass(frozen=True)
class DeviceHomes:
    """What a separate device is home to. All sizes are in pages."""

    layout: Layout
    options: Options
    at_home: frozenset[tuple[int, str]] = frozenset()
    """(unit, state) pairs, with gradients as states."""
    second_weights: Mapping[int, int] = field(default_factory=dict)
    """unit -> pages for another version of its weights, if other states of it pass the device."""

    def states(self, unit: UnitSpec) -> list[str]:
        """The states of a unit that live there."""
        return [state for state in self.possible if (unit.index, state) in self.at_home]

    @property
    def possible(self) -> tuple[str, ...]:
        """States and gradients to which the device may be home: first weights, then gradients, then the others."""
        late = [WEIGHT_BACK] if self.options.asynchronous else []
        return (WEIGHT, *late, GRAD, *(state.name for state in self.layout.states[1:]))

    def lines(self, unit: UnitSpec, states: Sequence[str], layout: Layout | None = None) -> dict[str, int]:
        """Line -> pages that states of a unit take there, in the layout of this rank or another one's."""
        lines = {state: (layout or self.layout).pages(unit, state) for state in states}
        if self.options.asynchronous and GRAD in lines:
            lines[GRAD_QUEUE] = lines[GRAD]
        return lines

    def most(self, unit: UnitSpec, states: Sequence[str]) -> int:
        """Pages that states of a unit take there, on the rank that has most of them. The same states live there on all
        ranks."""
        return max(sum(self.lines(unit, states, layout).values()) for layout in self._layouts)

    @cached_property
    def _layouts(self) -> list[Layout]:
        """The layouts of all ranks if they differ and states may live on the device, otherwise this one."""
        homes = (self.options.split or DEFAULT_SPLIT).device_home_share != 0
        return self.layout.of_all_ranks() if homes else [self.layout]


def choose_device_homes(
    layout: Layout, options: Options, device: int, update_ring: int, by_state: bool, two_versions: Collection[int]
) -> DeviceHomes:
    """What lives on a device with `device` pages: as much as fits the share of its memory that nothing else needs.

    Without a share, whole units live there, as many as let all others be leased at once. If the others cannot be, only
    mostly frozen units do, such as layers with adapters: each step ends their leases, so all of their weights would be
    fetched again. With a share, whole units live there too, or `by_state` the weights of the units that the device
    updates, then their gradients, their other states, and last whole other units. The last unit never lives there, so
    there is always something to lease.

    `two_versions`: units whose weights are in two versions there, unless the whole unit lives there.
    """
    none = DeviceHomes(layout, options)
    split = options.split or DEFAULT_SPLIT
    if split.device_home_share == 0:
        return none
    most, everything = none.most, none.possible
    units = [unit for unit in layout.units[:-1] if not unit.on_host]
    room = device - update_ring - reduce_buffers(layout).pages
    if split.device_home_share is None:
        left = room - sum(map(layout.lease_of, layout.units))
        # What lives there needs no lease, unless ranks have slices of it.
        spared = {unit.index: 0 if layout.is_sliced(unit, WEIGHT) else layout.lease_of(unit) for unit in units}
        pages = {unit.index: most(unit, everything) - spared[unit.index] for unit in units}
        if left < 0:
            left = room - layout.lease_pages()
            pages = {unit.index: most(unit, everything) for unit in units if unit.is_mostly_frozen}
        return replace(none, at_home=frozenset(product(first_that_fit(pages, left), everything)))
    groups = [(units, everything)]
    second: dict[int, int] = {}
    weights, moments = everything[: everything.index(GRAD)], everything[everything.index(GRAD) + 1 :]
    if by_state:
        updated = on_device((unit for unit in layout.units if unit.trainable_numel), split.device_update_share)
        there = [unit for unit in units if unit.index in updated]
        others = [unit for unit in units if unit.index not in updated]
        groups = [(there, weights), (there, (GRAD,)), (there, moments), (others, everything)]
        with_two = [unit for unit in there if unit.index in two_versions and not unit.is_mostly_frozen]
        second = {unit.index: most(unit, (WEIGHT,)) for unit in with_two}
    left = int(split.device_home_share * (room - layout.lease_pages()))
    at_home: set[tuple[int, str]] = set()
    for of_units, states in groups:
        pages = {unit.index: most(unit, states) for unit in of_units}
        for unit in second:  # it is taken with the weights, and given back if the whole unit lives there
            if states == weights:
                pages[unit] += second[unit]
            elif states == moments and (unit, WEIGHT) in at_home:
                pages[unit] -= second[unit]
        fit = first_that_fit(pages, left)
        left -= sum(pages[unit] for unit in fit)
        at_home.update(product(fit, states))
        if states == weights:
            second = {unit: second[unit] for unit in fit & second.keys()}
        elif states == moments:
            second = {unit: second[unit] for unit in second.keys() - fit}
    return replace(none, at_home=frozenset(at_home), second_weights=second)


def first_that_fit(pages: Mapping[int, int], room: int) -> frozenset[int]:
    """The units, in the order of `pages`, that fit together. One for which too little is left is passed over, because
    smaller ones may follow."""
    chosen = set()
    for unit, needed in pages.items():
        if needed <= room:
            chosen.add(unit)
            room -= needed
    return frozenset(chosen)
