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

    @cached_property
    def units(self) -> frozenset[int]:
        """Units of which a state lives there."""
        return frozenset(unit for unit, _ in self.at_home)

    @cached_property
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
    """What lives on a device with `device` pages: as much as fits the share of its memory that nothing else needs. The
    last unit never lives there, so there is always something to lease.

    `by_state`: with a share, what moves most of the units that the device updates lives there, instead of whole units.
    `two_versions`: units whose weights are then in two versions there, unless the whole unit lives there.
    """
    homes, share = DeviceHomes(layout, options), (options.split or DEFAULT_SPLIT).device_home_share
    if share == 0:
        return homes
    units = [unit for unit in layout.units[:-1] if not unit.on_host]
    room = device - update_ring - reduce_buffers(layout).pages
    if share is None:
        return _beside_all_leases(homes, units, room)
    room = int(share * (room - layout.lease_pages()))
    return _by_state(homes, units, room, two_versions) if by_state else _whole_units(homes, units, room, {})


def _beside_all_leases(homes: DeviceHomes, units: Sequence[UnitSpec], room: int) -> DeviceHomes:
    """As many whole units as let all others be leased at once. If the others cannot be, only mostly frozen units, such
    as layers with adapters: each step ends their leases, so all of their weights would be fetched again."""
    layout = homes.layout
    left = room - sum(map(layout.lease_of, layout.units))
    if left < 0:
        return _whole_units(homes, [unit for unit in units if unit.is_mostly_frozen], room - layout.lease_pages(), {})
    # What lives there needs no lease, unless ranks have slices of it.
    spared = {unit.index: layout.lease_of(unit) for unit in units if not layout.is_sliced(unit, WEIGHT)}
    return _whole_units(homes, units, left, spared)


def _whole_units(homes: DeviceHomes, units: Sequence[UnitSpec], room: int, spared: Mapping[int, int]) -> DeviceHomes:
    """The units that fit. `spared`: unit -> pages that are free once it lives there."""
    most = {unit.index: homes.most(unit, homes.possible) for unit in homes.layout.sizes}
    pages = {unit.index: most[homes.layout.alike[unit.index]] - spared.get(unit.index, 0) for unit in units}
    return replace(homes, at_home=frozenset(product(first_that_fit(pages, room), homes.possible)))


def _by_state(homes: DeviceHomes, units: Sequence[UnitSpec], room: int, two_versions: Collection[int]) -> DeviceHomes:
    """The weights of the units that the device updates, then their gradients, their other states, and last whole other
    units. A second version of weights is added (+1) with them, and given back (-1) when the other states come."""
    split = homes.options.split or DEFAULT_SPLIT
    updated = on_device((unit for unit in homes.layout.units if unit.trainable_numel), split.device_update_share)
    there, others = ([unit for unit in units if (unit.index in updated) is here] for here in (True, False))
    second = {u.index: homes.most(u, (WEIGHT,)) for u in there if u.index in two_versions and not u.is_mostly_frozen}
    states, at = homes.possible, homes.possible.index(GRAD)
    groups = (there, states[:at], +1), (there, (GRAD,), 0), (there, states[at + 1 :], -1), (others, states, 0)
    at_home: set[tuple[int, str]] = set()
    for of_units, group, added in groups:
        pages = {unit.index: homes.most(unit, group) + added * second.get(unit.index, 0) for unit in of_units}
        fit = first_that_fit(pages, room)
        room -= sum(pages[unit] for unit in fit)
        at_home.update(product(fit, group))
        if added:
            second = {unit: second[unit] for unit in second if (unit in fit) is (added > 0)}
    return replace(homes, at_home=frozenset(at_home), second_weights=second)


def first_that_fit(pages: Mapping[int, int], room: int) -> frozenset[int]:
    """The units, in the order of `pages`, that fit together. One for which too little is left is passed over, because
    smaller ones may follow."""
    chosen = set()
    for unit, needed in pages.items():
        if needed <= room:
            chosen.add(unit)
            room -= needed
    return frozenset(chosen)
