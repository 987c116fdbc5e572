"""Blocks: how each unit's update is divided, and the slots and places that its blocks pass."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pagoda.plan.device_updates import UPDATE_RING, slot_count
from pagoda.plan.layout import Layout
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, SSD
from pagoda.plan.units import UnitSpec

_PLACES_OF_A_THREAD = 2
"""Number of blocks at home in the update lane at once, for each of its threads: one is updated, the next one waits."""


class UnitBlocks(NamedTuple):
    """The blocks of one unit's update."""

    bounds: Sequence[tuple[int, int]]
    """First and last element of each, counted from the first element that this rank updates of the unit."""
    updater: int
    """Which updater has the unit: 0 (the CPU) or 1 (the device)."""
    streamed: bool
    """Whether states live on SSD, so that a block takes a slot of the ring."""
    takes_place: bool
    """Whether a block takes a place of its updater while it is updated."""
    after: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Block -> earlier blocks that must have been written before it is read. Most have none."""


class StreamPlan(NamedTuple):
    """The stream's view of a plan."""

    units: Sequence[UnitBlocks]
    slots: int
    """Number of slots of the ring."""
    places: tuple[int, int]
    """By updater, the number of its places. On the device, these are slots for a block that passes it. On the CPU, they
    keep the queue of the update lane short."""
    kept_free: int = 0
    """Number of slots that reading ahead leaves free. Two updaters may share the ring. Then each needs slots that the
    other does not hold for an update that has not been asked for yet."""

    def coarse(self, together: int) -> "StreamPlan":
        """The same with `together` neighbouring blocks as one, and as much fewer slots and places. Three suffice to
        read, update and write at once."""
        if together == 1:
            return self
        slots, places, kept = self.slots, self.places, self.kept_free
        fewer, cpu, device = (max(min(count, 3), count // together) for count in (slots, *places))
        units = [_coarse(unit, together) for unit in self.units]
        return StreamPlan(units, fewer, (cpu, device), fewer - (slots - kept) // together if kept else 0)


def stream_plan(plan: Plan, threads: int, at_once_bytes: int, updated: Callable[[UnitSpec], int]) -> StreamPlan:
    """The stream's view of `plan`. `threads` update units in RAM. An update in RAM of at most `at_once_bytes` takes no
    place. `updated` returns the number of elements that this rank updates of a unit."""
    layout, placement = plan.layout, plan.placement
    threads = 1 if layout.weight.copied else threads
    units = []
    for unit in plan.units:
        on_device = unit.index in placement.on_device
        names = (state.name for state in layout.states_of(unit))
        on_ssd = frozenset(name for name in names if placement.home(unit.index, name) == SSD)
        after: dict[int, tuple[int, ...]] = {}
        if layout.weight.whole is None:
            bounds = _uniform(updated(unit), plan.update_block(unit, threads))
        else:
            bounds, after = _whole(layout, unit, on_ssd)
        if on_device:
            takes_place = unit.index in placement.passing or layout.weight.copied
        else:
            is_small = layout.updated_elements(unit) * layout.bytes_per_update(unit) <= at_once_bytes
            takes_place = not (on_ssd or is_small)
        units.append(UnitBlocks(bounds, int(on_device), bool(on_ssd), takes_place, after))
    both = any(unit.streamed and unit.updater for unit in units)
    places = _PLACES_OF_A_THREAD * threads, slot_count(layout) if placement.pages(DEVICE, UPDATE_RING) else 0
    return StreamPlan(units, placement.ring_slots, places, layout.least_ring_slots if both else 0)


def _uniform(total: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, total)) for start in range(0, total, block)]


def _whole(
    layout: Layout, unit: UnitSpec, on_ssd: frozenset[str]
) -> tuple[list[tuple[int, int]], dict[int, tuple[int, ...]]]:
    """The blocks of a rule that takes whole parameters, and the earlier blocks that must be written before each. Parts
    of several parameters may share a page of a state on SSD. So a block is read after all writes to its first page. An
    update may leave out any block, so each names all earlier blocks in that page."""
    origin = layout.slices.updated(unit, layout.rank).start
    bounds: list[tuple[int, int]] = []
    after: dict[int, tuple[int, ...]] = {}
    ends: dict[str, list[tuple[int, int]]] = {}
    """State -> the ends of the pages of its latest parts, and the blocks with these parts."""
    for index, cut in enumerate(layout.cuts(unit)):
        bounds.append((cut.start - origin, cut.stop - origin))
        earlier = set[int]()
        for state in layout.states_of(unit):
            part = layout.part(unit, cut, state) if state.name in on_ssd else None
            if part is None:
                continue
            offset, nbytes = layout.window(part, state)
            shared = [(end, before) for end, before in ends.get(state.name, ()) if end > offset]
            earlier.update(before for _, before in shared)
            ends[state.name] = [*shared, (offset + nbytes, index)]
        if earlier:
            after[index] = tuple(sorted(earlier))
    return bounds, after


def _coarse(unit: UnitBlocks, together: int) -> UnitBlocks:
    """A unit with `together` blocks as one."""
    groups = [unit.bounds[first : first + together] for first in range(0, len(unit.bounds), together)]
    after: dict[int, set[int]] = {}
    for block, earlier in unit.after.items():
        after.setdefault(block // together, set()).update(each // together for each in earlier)
    coarse = {block: tuple(sorted(earlier - {block})) for block, earlier in after.items()}
    return unit._replace(bounds=[(group[0][0], group[-1][1]) for group in groups], after=coarse)
