"""The buffers of several ranks: those in which they add up gradients, and that in which they hand on weights."""

from dataclasses import dataclass

from pagoda.memory.page import pages_for
from pagoda.plan.layout import BLOCK_ELEMENTS, WEIGHT, Layout
from pagoda.plan.units import align

MOST_REDUCING_BYTES = 10 * BLOCK_ELEMENTS
"""Most of what adding up ranks' gradients takes beside whole ones, for up to 4096 ranks: a block's worth of pieces as
they arrive, the fp32 sums and the mean of one piece."""
MESSAGE_BYTES = 4 << 20
"""Slices of weights travel between ranks in messages of at most this many bytes."""


@dataclass(frozen=True, slots=True)
class ReduceBuffers:
    """In which gradients are added up, where compute leaves them: two for whole gradients, one that backward fills and
    one that is reduced piece by piece, and what reducing takes."""

    whole_pages: int
    """Each of the two, for the widest unit."""
    piece: int
    """Elements of a slice that are reduced at a time: what arrives from all ranks together is a block at most, half of
    one with replicas, whose sums take as much again."""
    sums: int
    """fp32 sums of a piece that there are at once: of a replica's gradients, and of replicas."""
    landing_bytes: int
    """What arrives from other ranks at once, twice: gradients of a replica's, or fp32 sums of replicas."""
    pages: int
    """In all."""


def reduce_buffers(layout: Layout) -> ReduceBuffers | None:
    """The buffers of one rank; None where there is nobody to share gradients with."""
    ranks, slices, itemsize = layout.ranks, layout.slices, layout.offloaded_itemsize
    if ranks is None or ranks.data_parallel == 1:
        return None
    sums = 1 if ranks.replicas == 1 else 2
    widest_slice = max(
        slices.room(unit, place) for unit in layout.units for place in range(slices.group(unit) if slices.differ else 1)
    )
    piece = min(widest_slice, align(max(1, BLOCK_ELEMENTS // (ranks.data_parallel * sums))))
    sharers = ranks.data_parallel // ranks.replicas
    landing_bytes = 2 * align(piece * max(sharers * itemsize, ranks.replicas * 4))
    whole = pages_for(max(unit.trainable_numel for unit in layout.units) * itemsize, layout.page_bytes)
    reducing = pages_for(landing_bytes + piece * (4 * sums + itemsize), layout.page_bytes)
    return ReduceBuffers(whole, piece, sums, landing_bytes, 2 * whole + reducing)


def reduce_pages(layout: Layout) -> int:
    """Pages of the buffers in which gradients are added up."""
    buffers = reduce_buffers(layout)
    return 0 if buffers is None else buffers.pages


def serving_pages(layout: Layout) -> int:
    """What a slice on SSD passes on its way to a rank that asks for it alone: a message, wherever it begins."""
    if layout.ranks is None or not layout.ranks.shards_weights:
        return 0
    widest = max(layout.pages(unit, WEIGHT) for unit in layout.units)
    return min(widest, pages_for(MESSAGE_BYTES, layout.page_bytes)) + 1
