"""Layout: how many elements and pages every state of every unit takes, on one rank."""

from dataclasses import dataclass

import torch

from pagoda.memory.page import pages_for
from pagoda.optim.rule import StateSpec
from pagoda.plan.ranks import Ranks
from pagoda.plan.shards import slice_elements
from pagoda.plan.units import UnitSpec, align, enclosing

WEIGHT, GRAD = "weight", "grad"
WEIGHT_BACK, GRAD_QUEUE = "weight_back", "grad_queue"
"""What asynchronous updates need beside: a second extent of every weight, and the gradients that wait."""

RING_SLOTS = 4
"""Blocks in flight on SSD at once, at least: one being read, one updated, one written, one to spare."""
FETCH_PIECE_BYTES = 4 << 20
PIECE_ELEMENTS = 1 << 20
"""Elements of a state that a checkpoint writes, and hashes, at a time."""
BLOCK_ELEMENTS = 1 << 20
"""Elements the update kernel takes at a time: its streams then stay a few MiB, and two threads share a unit."""
_ACTIVATION_BUFFER_PAGES, _ACTIVATION_BUFFER_BYTES = 16, 4 << 20
"""Most of one buffer between activations and SSD."""


@dataclass(frozen=True)
class Layout:
    """Sizes that follow from units, states and page size alone."""

    units: tuple[UnitSpec, ...]
    states: tuple[StateSpec, ...]
    """The optimizer's states in order; the first is the weight."""
    page_bytes: int
    block_limit: int = BLOCK_ELEMENTS
    """Most elements of a streamed block."""
    ranks: Ranks | None = None
    """None where one rank has everything."""
    expert_units: frozenset[int] = frozenset()
    """Units of experts: a step uses some of them, and only some of the ranks share each."""
    max_staleness: int | None = None
    """Steps whose gradients may wait to be applied while a forward reads the weights; None where updates are not
    asynchronous. Then weights have two extents, and every gradient one in RAM and one more for each such step."""
    offloads: bool = False
    """Whether activations may be offloaded to SSD, through buffers in RAM."""
    gradient: torch.dtype | None = None
    """What gradients are accumulated and kept in; None: what weights have."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.gradient or self.weight.dtype

    @property
    def has_device_kernels(self) -> bool:
        """Whether a GPU has kernels for these formats: those of gradients in the weights' own dtype, bf16 or fp32."""
        return self.gradient_dtype is self.weight.dtype and self.weight.dtype is not torch.float16

    @property
    def offloaded_itemsize(self) -> int:
        """Bytes of an element of a gradient on its way from compute; longer ones are widened where they are kept."""
        return min(self.gradient_dtype.itemsize, self.weight.dtype.itemsize)

    @property
    def weight(self) -> StateSpec:
        return self.states[0]

    @property
    def moments(self) -> tuple[StateSpec, ...]:
        """States beside the weight that RAM or SSD is home to: low half of the master, first and second moment."""
        return tuple(state for state in self.states[1:] if state.per == 1)

    @property
    def scales(self) -> tuple[StateSpec, ...]:
        """States with one element for many parameters. RAM is always home to them: a streamed block's share of one
        would be a few KiB, far below a page."""
        return tuple(state for state in self.states if state.per > 1)

    def itemsize(self, state: str) -> int:
        """Bytes of an element."""
        if state == GRAD:
            return self.gradient_dtype.itemsize
        name = WEIGHT if state == WEIGHT_BACK else state
        return next(s.dtype.itemsize for s in self.states if s.name == name)

    def group(self, unit: UnitSpec) -> int:
        """Ranks that share the state of a unit."""
        if self.ranks is None:
            return 1
        apart = self.ranks.expert_parallel if unit.index in self.expert_units else self.ranks.replicas
        return self.ranks.data_parallel // apart

    def elements(self, unit: UnitSpec, state: str) -> int:
        """Elements of one extent on this rank: all, or a slice as large as every rank's."""
        per = next((s.per for s in self.states if s.name == state), 1)
        return -(-self._covered(unit, state) // per)

    def is_sliced(self, state: str) -> bool:
        """Whether ranks that share a unit have slices of a state, not all of it each."""
        if self.ranks is None:
            return False
        return {WEIGHT: self.ranks.shards_weights, GRAD: self.ranks.shards_gradients}.get(state, True)

    def _covered(self, unit: UnitSpec, state: str) -> int:
        """Parameters that one extent on this rank is for; frozen ones are sliced apart, behind the others."""
        frozen = unit.numel - unit.trainable_numel if state in (WEIGHT, WEIGHT_BACK) else 0
        if not self.is_sliced(state):
            return unit.trainable_numel + frozen
        return slice_elements(unit.trainable_numel, self.group(unit)) + slice_elements(frozen, self.group(unit))

    def updated_elements(self, unit: UnitSpec) -> int:
        """Parameters of a unit that this rank updates at most: whole quantization blocks."""
        return slice_elements(unit.trainable_numel, self.group(unit))

    @property
    def bytes_per_update(self) -> float:
        """Bytes of RAM that the update of one parameter reads and writes: every state twice, the gradient once."""
        return 2 * sum(s.dtype.itemsize / s.per for s in self.states) + self.itemsize(GRAD)

    def pages(self, unit: UnitSpec, state: str) -> int:
        """Pages of one extent."""
        return pages_for(self.elements(unit, state) * self.itemsize(state), self.page_bytes)

    def trained_weight_pages(self, unit: UnitSpec) -> int:
        """Pages of the weights that an update changes."""
        return pages_for(unit.trainable_numel * self.weight.dtype.itemsize, self.page_bytes)

    def lease_of(self, unit: UnitSpec) -> int:
        """Pages of a lease: the whole unit, made of every rank's slice."""
        return pages_for(unit.numel * self.weight.dtype.itemsize, self.page_bytes)

    def gathers_after_update(self, unit: UnitSpec) -> bool:
        """Whether every rank has all of a unit's weights and updates a slice of them."""
        return self.ranks is not None and not self.ranks.shards_weights and self.group(unit) > 1

    @property
    def reduced_elements(self) -> int:
        """Elements of a slice that are reduced at a time: what arrives from all ranks together is a block at most."""
        assert self.ranks is not None
        widest = max(self.updated_elements(unit) for unit in self.units)
        return min(widest, align(max(1, BLOCK_ELEMENTS // self.ranks.data_parallel)))

    @property
    def landing_bytes(self) -> int:
        """What arrives from other ranks at once: gradients of a replica's, or fp32 sums of replicas."""
        assert self.ranks is not None
        sharers = self.ranks.data_parallel // self.ranks.replicas
        return self.reduced_elements * max(sharers * self.offloaded_itemsize, self.ranks.replicas * 4)

    @property
    def whole_gradient_pages(self) -> int:
        """Pages of the gradient of the widest unit, before it is sliced."""
        widest = max(unit.trainable_numel for unit in self.units)
        return pages_for(widest * self.offloaded_itemsize, self.page_bytes)

    @property
    def collective_pages(self) -> int:
        """Two buffers for whole gradients, one that backward fills and one that is reduced, and what reducing takes."""
        if self.ranks is None or self.ranks.data_parallel == 1:
            return 0
        reducing = self.landing_bytes + self.reduced_elements * (2 * 4 + self.offloaded_itemsize)
        return 2 * self.whole_gradient_pages + pages_for(reducing, self.page_bytes)

    @property
    def block_elements(self) -> int:
        """Elements per streamed block, such that every streamed state's share of it is whole pages."""
        per_page = self.page_bytes // min(s.dtype.itemsize for s in (self.weight, *self.moments))
        quarter = (
            max(-(-unit.numel // self.group(unit)) for unit in self.units) // RING_SLOTS
        )  # so that the ring holds one unit at most
        return -(-min(self.block_limit, quarter + 1) // per_page) * per_page

    def block_pages(self, state: str) -> int:
        return pages_for(self.block_elements * self.itemsize(state), self.page_bytes)

    @property
    def fetch_piece_pages(self) -> int:
        """Pages of one slot of the fetch ring."""
        widest = max(self.pages(unit, WEIGHT) for unit in self.units)
        return min(widest, pages_for(FETCH_PIECE_BYTES, self.page_bytes))

    @property
    def piece_pages(self) -> int:
        """Pages that hold a piece of a checkpoint, wherever it begins in its first page."""
        widest = min(PIECE_ELEMENTS, max(unit.numel for unit in self.units))
        return pages_for(widest * max(s.dtype.itemsize for s in self.states), self.page_bytes) + 1

    @property
    def activation_buffer_pages(self) -> int:
        """Pages of each buffer between activations and SSD."""
        return max(1, min(_ACTIVATION_BUFFER_PAGES, _ACTIVATION_BUFFER_BYTES // self.page_bytes))

    def lease_pages(self, ahead: int) -> int:
        """Frames with which a unit, those around it and `ahead` more can be leased at once, wherever they lie.

        Whatever is in use may touch a slab each, so each counts as a slab, that is as the widest unit.
        """
        leases = [self.lease_of(unit) for unit in self.units]
        in_use = 1 + max(len(around) for around in enclosing(self.units).values())
        return min(sum(leases), (in_use + ahead) * max(leases))

    def total_pages(self, state: str) -> int:
        return sum(self.pages(unit, state) for unit in self.units)
