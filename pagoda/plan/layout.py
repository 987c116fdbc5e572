"""Layout: the number of elements and pages of every state of every unit, on one rank."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pagoda.memory.page import pages_for
from pagoda.optim.rule import StateSpec, states_in
from pagoda.plan.buffers import (
    ACTIVATION_BUFFER_BYTES,
    ACTIVATION_BUFFER_PAGES,
    BLOCK_ELEMENTS,
    BLOCKS_OF_A_THREAD,
    BOUNCE_ELEMENTS,
    FETCH_PIECE_BYTES,
    LEASES_AHEAD,
    LEAST_RING_SLOTS,
    MOST_AT_HOME,
    MOST_BOUNCE_BUFFERS,
    MOST_BOUNCED,
    MOST_LAUNCHED,
    PIECE_ELEMENTS,
)
from pagoda.plan.packed import Packed, ShapedSpan
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.slices import Slices, slice_elements
from pagoda.plan.units import UnitSpec, align, enclosing

WEIGHT, GRAD = "weight", "grad"
WEIGHT_BACK, GRAD_QUEUE = f"{WEIGHT}_back", "grad_queue"
"""What asynchronous updates need in addition: room for new weights beside those that a step reads, and gradients that
wait. In a checkpoint, WEIGHT_BACK is the weights that steps read while these lag."""

SMALL = 64
"""A state with shapes of its own stays off SSD if it has at most one element for this many trained elements."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A block of an update, for a rule that takes whole parameters: elements [start, stop) of a unit. They belong to
    one parameter."""

    start: int
    stop: int
    slot: int
    whole: bool
    """Whether it is the whole parameter, in its shape."""


@dataclass(frozen=True)
class Layout:
    """Sizes that depend only on units, states and page size."""

    units: tuple[UnitSpec, ...]
    states: tuple[StateSpec, ...]
    """The optimizer's states in order. The first one is the weight."""
    page_bytes: int
    block_limit: int = BLOCK_ELEMENTS
    """Most elements of a streamed block."""
    ranks: Ranks = ALONE
    rank: int = 0
    """The rank that these extents belong to. 0 if all ranks have equally many elements."""
    expert_units: frozenset[int] = frozenset()
    """Units of experts. A step uses some of them, and only some ranks share each."""
    gradient: torch.dtype | None = None
    """The dtype in which gradients are accumulated and kept. None: the weights' dtype."""

    # --- states and their dtypes --------------------------------------------------------------------------

    @property
    def weight(self) -> StateSpec:
        """The weights of most parameters. Other units may have another dtype."""
        return self.states[0]

    def states_of(self, unit: UnitSpec) -> tuple[StateSpec, ...]:
        """The states of a unit, in the dtypes that it has them in."""
        return self._states_in[unit.dtype]

    @cached_property
    def _states_in(self) -> dict[torch.dtype | None, tuple[StateSpec, ...]]:
        """Dtype of a unit -> its states."""
        return {dtype: states_in(self.states, dtype) for dtype in {unit.dtype for unit in self.units}}

    @property
    def moments(self) -> tuple[StateSpec, ...]:
        """The states other than the weight that may live on SSD: what else stores the master, and the moments."""
        return tuple(state for state in self.states[1:] if state not in self.small)

    @cached_property
    def small(self) -> tuple[StateSpec, ...]:
        """States with one element for many parameters: floors, factors, counts. They never live on SSD, because a
        streamed block's share of one would be a few KiB, far less than a page."""
        most = sum(unit.trainable_numel for unit in self.units) // SMALL
        return tuple(
            state
            for state in self.states
            if state.per > 1 or (state.shape_of is not None and self._packed[state.name].total <= most)
        )

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of weights, that of most parameters first."""
        return tuple(dtype or self.weight.dtype for dtype in sorted(self._states_in, key=str))

    @property
    def forms(self) -> list[tuple[torch.dtype, torch.dtype]]:
        """The dtype of weights and that of gradients, for each dtype of weights."""
        return [(dtype, self.gradient or dtype) for dtype in self.dtypes]

    def dtype(self, unit: UnitSpec, state: str) -> torch.dtype:
        """Dtype of an extent. Both extents of weights have the same."""
        known = self._dtypes[unit.dtype]
        return known.get(state, known[WEIGHT])

    def has(self, unit: UnitSpec, state: str) -> bool:
        """Whether the parameters of a unit may have a state. Only fp32 weights lack one: what else stores a master."""
        return state in self._dtypes[unit.dtype] or state not in self._dtypes[None]

    @cached_property
    def _dtypes(self) -> dict[torch.dtype | None, dict[str, torch.dtype]]:
        """Dtype of a unit -> state -> its dtype."""
        found: dict[torch.dtype | None, dict[str, torch.dtype]] = {}
        for dtype, states in {None: self.states, **self._states_in}.items():
            found[dtype] = {state.name: state.dtype for state in states}
            found[dtype][GRAD] = self.gradient or found[dtype][WEIGHT]
        return found

    def itemsize(self, unit: UnitSpec, state: str) -> int:
        """Bytes per element."""
        return self.dtype(unit, state).itemsize

    def offloaded_itemsize(self, unit: UnitSpec) -> int:
        """Bytes per element of a gradient on its way from compute. A wider gradient is widened where it is kept."""
        return min(self.itemsize(unit, GRAD), self.itemsize(unit, WEIGHT))

    def widest(self, state: str) -> int:
        """Most bytes per element of a state of any unit, for buffers that units share."""
        return max(known[state].itemsize for known in self._dtypes.values() if state in known)

    # --- what each rank has -------------------------------------------------------------------------------

    @cached_property
    def slices(self) -> Slices:
        """The part that each rank holds. If every rank has all weights, equal slices are whole pages of them, so that
        an update never shares a page with data from other ranks. Slices of whole parameters may share pages."""
        pages = None if self.ranks.shards_weights else self.page_bytes
        return Slices(self.units, self.states_of, self._packed, self.ranks, self.expert_units, pages)

    def group(self, unit: UnitSpec) -> int:
        """Number of ranks that share the state of a unit."""
        return self.slices.group(unit)

    def is_sliced(self, unit: UnitSpec, state: str) -> bool:
        """Whether ranks divide a state of a unit, so that each has a slice and not all of it."""
        if self.group(unit) == 1:
            return False
        whole = {WEIGHT: not self.ranks.shards_weights, GRAD: not self.ranks.shards_gradients}
        return not whole.get(WEIGHT if state == WEIGHT_BACK else state, False)

    @property
    def shares_experts(self) -> bool:
        """Whether ranks add up gradients of units that each of them uses in its own order, or not at all."""
        return bool(self.expert_units) and self.ranks.shares_experts

    def gathers_after_update(self, unit: UnitSpec) -> bool:
        """Whether every rank has all of a unit's weights and updates a slice of them."""
        return not self.ranks.shards_weights and self.group(unit) > 1

    def updated_elements(self, unit: UnitSpec) -> int:
        """Most parameters of a unit that this rank updates, in whole quantization blocks."""
        return self.slices.room(unit, self.slices.place(unit, self.rank))

    def of_all_ranks(self) -> list["Layout"]:
        """This layout on every rank if ranks hold different numbers of elements, otherwise only itself."""
        if not self.slices.differ:
            return [self]
        return [self._shared_with(replace(self, rank=rank), "slices", "_packed") for rank in range(self.ranks.count)]

    def with_block_limit(self, block_limit: int) -> "Layout":
        """The same extents, streamed in other blocks."""
        same = "_known_pages", "alike", "_counts", "_leases_of", "_leases", "_dtypes"
        return self._shared_with(replace(self, block_limit=block_limit), *same)

    def with_page_bytes(self, page_bytes: int) -> "Layout":
        """The same extents in other pages."""
        return self._shared_with(replace(self, page_bytes=page_bytes), "alike", "_counts", "_dtypes")

    def _shared_with(self, other: "Layout", *cached: str) -> "Layout":
        """The other layout, with cached properties of this one that are equal in both."""
        other.__dict__.update({name: getattr(self, name) for name in cached})
        return other

    # --- extents ------------------------------------------------------------------------------------------

    def span(self, unit: UnitSpec, slot: int, state: StateSpec) -> ShapedSpan | None:
        """A parameter's part of a state. None if it has none."""
        if state.shape_of is not None:
            return self._packed[state.name].span(unit, slot)
        placed = unit.slots[slot]
        if (not placed.param.trainable and state.name != WEIGHT) or not self.has(unit, state.name):
            return None
        shape = state.shape(placed.param.name, placed.param.shape)
        assert shape is not None, "only a state with shapes of its own may lack one"
        return ShapedSpan(state.elements(placed.offset), state.elements(placed.param.numel), shape)

    @cached_property
    def _packed(self) -> dict[str, Packed]:
        """The states with shapes of their own."""
        return {state.name: Packed(self.units, state.shape_of) for state in self.states if state.shape_of is not None}

    def elements(self, unit: UnitSpec, state: str) -> int:
        """Elements of an extent on this rank: all, or a slice."""
        cut = self.is_sliced(unit, state)
        if not self.has(unit, state):
            return 0
        if state in self._packed:
            if not cut:
                return self._packed[state].elements(unit)
            return sum(map(len, self.slices.of_state(unit, state, [self.slices.updated(unit, self.rank)])))
        trained = self.updated_elements(unit) if cut else unit.trainable_numel
        frozen = unit.numel - unit.trainable_numel if state in (WEIGHT, WEIGHT_BACK) else 0
        per = next((s.per for s in self.states if s.name == state), 1)
        return -(-(trained + (slice_elements(frozen, self.group(unit)) if cut else frozen)) // per)

    def weight_bytes(self, unit: UnitSpec) -> int:
        """Bytes of all of a unit's weights."""
        return unit.numel * self.itemsize(unit, WEIGHT)

    def trained_elements(self, unit: UnitSpec) -> int:
        """Elements at the start of an extent's weights that updates change. Frozen ones follow."""
        return self.updated_elements(unit) if self.is_sliced(unit, WEIGHT) else unit.trainable_numel

    def pages(self, unit: UnitSpec, state: str) -> int:
        """Pages of one extent."""
        key = self.alike[unit.index], state
        if key not in self._known_pages:
            self._known_pages[key] = pages_for(self.elements(unit, state) * self.itemsize(unit, state), self.page_bytes)
        return self._known_pages[key]

    @cached_property
    def _known_pages(self) -> dict[tuple[int, str], int]:
        """Pages of extents that were asked for before. A planner asks for each about a dozen times."""
        return {}

    @cached_property
    def alike(self) -> list[int]:
        """For each unit, the first one whose extents are as long: with most rules, one with as many elements. A model
        may have thousands of experts, and few sizes."""
        if self.weight.whole is not None or self._packed:
            return [unit.index for unit in self.units]
        firsts: dict[object, int] = {}
        keys = ((u.numel, u.trainable_numel, u.index in self.expert_units, u.dtype) for u in self.units)
        return [firsts.setdefault(key, index) for index, key in enumerate(keys)]

    @cached_property
    def _counts(self) -> Counter[int]:
        """The first unit of each size -> the number of units of this size."""
        return Counter(self.alike)

    @property
    def sizes(self) -> list[UnitSpec]:
        """The first unit of each size."""
        return [self.units[first] for first in self._counts]

    def total_pages(self, state: str) -> int:
        return sum(count * self.pages(self.units[first], state) for first, count in self._counts.items())

    def total_bytes(self, state: str) -> int:
        """Bytes of a state without padding to pages."""
        firsts = zip(self.sizes, self._counts.values(), strict=True)
        return sum(count * self.elements(unit, state) * self.itemsize(unit, state) for unit, count in firsts)

    def trained_weight_pages(self, unit: UnitSpec) -> int:
        """Pages of an extent's weights from its start to the last one that an update changes."""
        return pages_for(self.trained_elements(unit) * self.itemsize(unit, WEIGHT), self.page_bytes)

    def frozen_pages(self, unit: UnitSpec, state: str) -> int:
        """Pages of an extent that updates never change."""
        return self.pages(unit, state) - self.trained_weight_pages(unit) if state in (WEIGHT, WEIGHT_BACK) else 0

    def updated_bytes(self, unit: UnitSpec, state: StateSpec) -> int:
        """Bytes of a state that the update of a unit reads and writes on this rank."""
        if state.shape_of is not None:
            return self.elements(unit, state.name) * state.dtype.itemsize
        return state.nbytes(self.updated_elements(unit))

    @cached_property
    def bytes_per_parameter(self) -> Mapping[str, float]:
        """State -> bytes per trained parameter, without padding."""
        of_dtype: Counter[torch.dtype | None] = Counter()
        for unit in self.units:
            of_dtype[unit.dtype] += sum(slot.param.numel for slot in unit.slots if slot.param.trainable)
        trained = max(1, of_dtype.total())
        total = dict.fromkeys((state.name for state in self.states), 0.0)
        for dtype, numel in of_dtype.items():
            for state in self._states_in[dtype]:
                total[state.name] += numel * state.dtype.itemsize / state.per
        for state in self.states:
            if state.shape_of is not None:
                total[state.name] = self._packed[state.name].total * state.dtype.itemsize
        return {name: nbytes / trained for name, nbytes in total.items()}

    def bytes_per_update(self, unit: UnitSpec) -> float:
        """Bytes of RAM that the update of one parameter reads and writes: every state twice, and the gradient once."""
        return 2 * sum(self.bytes_per_parameter.values()) + self.itemsize(unit, GRAD)

    # --- blocks of updates --------------------------------------------------------------------------------

    def cuts(self, unit: UnitSpec) -> list[Cut]:
        """The blocks of this rank's slice for a rule that takes whole parameters: whole parameters, and pieces of those
        that may be cut."""
        takes_whole = self.weight.whole
        assert takes_whole is not None
        cuts: list[Cut] = []
        mine = self.slices.updated(unit, self.rank)
        for slot, placed in enumerate(unit.slots):
            part = mine.within(placed.offset, placed.offset + placed.param.numel)
            if placed.param.trainable and part is not None:
                whole = takes_whole(placed.param.name, placed.param.shape)
                step = len(part) if whole else self.block_limit
                starts = range(part.start, part.stop, step)
                cuts += [Cut(at, min(part.stop, at + step), slot, whole) for at in starts]
        return cuts

    def part(self, unit: UnitSpec, cut: Cut, state: StateSpec) -> ShapedSpan | None:
        """A cut's part of a state in this rank's extent. None if its parameter has none."""
        span = self.span(unit, cut.slot, state)
        if span is None:
            return None
        first = span.first - self._begin(unit, state.name)
        if cut.whole:
            return replace(span, first=first)
        count = cut.stop - cut.start
        return ShapedSpan(first + cut.start - unit.slots[cut.slot].offset, count, (count,))

    def _begin(self, unit: UnitSpec, state: str) -> int:
        """The element of a state with which this rank's extent begins."""
        if not self.is_sliced(unit, state):
            return 0
        mine = self.slices.of_state(unit, state, [self.slices.updated(unit, self.rank)])
        return mine[0].start if mine else 0

    def window(self, part: ShapedSpan, state: StateSpec) -> tuple[int, int]:
        """Offset and bytes of the whole pages of an extent that contain a part of it."""
        first, end = part.first * state.dtype.itemsize, (part.first + part.count) * state.dtype.itemsize
        offset = first // self.page_bytes * self.page_bytes
        return offset, pages_for(end - offset, self.page_bytes) * self.page_bytes

    def most_in_block(self, state: StateSpec) -> int:
        """Most elements of a state in a block of an update, on any rank."""
        takes_whole = self.weight.whole
        if takes_whole is None:
            return state.elements(self.block_elements)
        most = 0
        for unit in self.units:
            for slot, placed in enumerate(unit.slots):
                span = self.span(unit, slot, state) if placed.param.trainable else None
                if span is not None:
                    whole = takes_whole(placed.param.name, placed.param.shape)
                    most = max(most, span.count if whole else min(span.count, self.block_limit))
        return most

    @cached_property
    def block_elements(self) -> int:
        """Elements of a streamed block. Every streamed state's share of it is whole pages. For a rule that takes whole
        parameters, the elements of the largest cut."""
        if self.weight.whole is not None:
            return max(1, self.most_in_block(self.weight))
        streamed = (WEIGHT, *(state.name for state in self.moments))
        sizes = (known[name].itemsize for known in self._dtypes.values() for name in streamed if name in known)
        per_page = self.page_bytes // min(sizes)
        # So that the ring holds at most one unit.
        most = max(-(-unit.numel // self.group(unit)) for unit in self.sizes) // LEAST_RING_SLOTS
        return -(-min(self.block_limit, most + 1) // per_page) * per_page

    def block_at_home(self, unit: UnitSpec, on_device: bool, threads: int) -> int:
        """Elements of a block of an update that passes no ring. On a device, one launch takes all. In RAM, `threads`
        threads share a large unit."""
        if on_device:
            return MOST_LAUNCHED
        share = -(-self.updated_elements(unit) // (BLOCKS_OF_A_THREAD * threads))
        return max(self.block_elements, min(align(share), MOST_AT_HOME))

    def block_pages(self, state: str) -> int:
        """Pages of a block's share of a state, wherever it begins in a page."""
        if self.weight.whole is None:
            return pages_for(self.block_elements * self.widest(state), self.page_bytes)
        return self._window_pages[state]

    @cached_property
    def _window_pages(self) -> dict[str, int]:
        """State -> pages of the largest window of a cut's part."""
        pages = dict.fromkeys((state.name for state in self.states), 0)
        for unit in self.units:
            for cut in self.cuts(unit):
                for state in self.states_of(unit):
                    part = self.part(unit, cut, state)
                    if part is not None:
                        pages[state.name] = max(pages[state.name], self.window(part, state)[1] // self.page_bytes)
        return pages

    @property
    def least_ring_slots(self) -> int:
        """Number of blocks that the ring must hold. A rule that takes whole parameters needs one."""
        return LEAST_RING_SLOTS if self.weight.whole is None else 1

    @cached_property
    def work_elements(self) -> int:
        """fp32 elements for copies of a block's gradient, and of its master unless that is stored. 0 for a rule that
        needs no copies."""
        if not self.weight.copied:
            return 0
        tensors = 1 if self.weight.dtype is torch.float32 else 2
        return tensors * align(self.most_in_block(self.weight))

    @property
    def work_pages(self) -> int:
        """Pages of RAM for `work_elements`."""
        return pages_for(4 * self.work_elements, self.page_bytes)

    # --- leases and other buffers -------------------------------------------------------------------------

    def lease_of(self, unit: UnitSpec) -> int:
        """Pages of a lease: of the whole unit, with room for every rank's slice as if all were equally long. 0 for a
        unit that is used in RAM."""
        return self._leases_of[unit.index]

    @cached_property
    def _leases_of(self) -> list[int]:
        """By unit, the pages of its lease."""
        pages = []
        for unit in self.units:
            elements = 0 if unit.on_host else unit.numel
            if elements and self.is_sliced(unit, WEIGHT):
                group, trained = self.group(unit), unit.trainable_numel
                frozen = slice_elements(elements - trained, group)
                elements = max(group * slice_elements(trained, group), trained + group * frozen)
            pages.append(pages_for(elements * self.itemsize(unit, WEIGHT), self.page_bytes))
        return pages

    def lease_pages(self, ahead: int = LEASES_AHEAD) -> int:
        """Frames with which a unit, the units around it and `ahead` more can be leased at once, wherever they lie.

        Each of these may touch a slab, so each counts as a slab, which is as large as the widest unit.
        """
        in_use, widest, total = self._leases
        return min(total, (in_use + ahead) * widest)

    @cached_property
    def _leases(self) -> tuple[int, int, int]:
        """Units in use at once, frames of the widest lease, and frames of all leases."""
        most_around = max(len(around) for around in enclosing(self.units).values())
        return 1 + most_around, max(self._leases_of), sum(self._leases_of)

    @cached_property
    def fetch_piece_pages(self) -> int:
        """Pages of one slot of the fetch ring."""
        widest = max(self.pages(unit, WEIGHT) for unit in self.sizes)
        return min(widest, pages_for(FETCH_PIECE_BYTES, self.page_bytes))

    @property
    def sharing_pages(self) -> int:
        """Pages in which the updated slices of a unit's weights are gathered on their way to a copy on SSD."""
        return max(map(self.trained_weight_pages, filter(self.gathers_after_update, self.sizes)), default=0)

    @cached_property
    def bounce(self) -> tuple[int, int]:
        """Number of buffers in which gradients from a separate device are added, and the elements of one. As many as
        keep several threads busy, but two small ones if the budget is tight."""
        widest = max((unit.trainable_numel for unit in self.units if not unit.on_host), default=0)
        parts = -(-widest // BOUNCE_ELEMENTS)
        if self.block_limit < BLOCK_ELEMENTS or parts <= 2:
            return 2, min(BOUNCE_ELEMENTS, widest)
        each = min(MOST_BOUNCED, -(-parts // MOST_BOUNCE_BUFFERS))
        return min(MOST_BOUNCE_BUFFERS, -(-parts // each)), each * BOUNCE_ELEMENTS

    @property
    def piece_pages(self) -> int:
        """Pages that contain a piece of a checkpoint, wherever it begins in its first page."""
        spans = (span.count for packed in self._packed.values() for span in packed.spans())
        widest = min(PIECE_ELEMENTS, max(*(unit.numel for unit in self.units), *spans, 0))
        return pages_for(widest * max(self.widest(s.name) for s in self.states), self.page_bytes) + 1

    @property
    def activation_buffer_pages(self) -> int:
        """Pages of each buffer between activations and SSD."""
        return max(1, min(ACTIVATION_BUFFER_PAGES, ACTIVATION_BUFFER_BYTES // self.page_bytes))
