"""The buffers of several ranks: those in which they add up gradients, and that in which they hand on weights."""

from dataclasses import dataclass

from pagoda.memory.page import pages_for
from pagoda.plan.layout import BLOCK_ELEMENTS, WEIGHT, Layout
from pagoda.plan.slices import slice_elements
from pagoda.plan.units import ALIGN_ELEMENTS, UnitSpec, align

MESSAGE_BYTES = 4 << 20
"""A slice on SSD is handed on in messages of at most this many bytes."""
_HEADER_BYTES = 256
"""A header, which has a byte for each parameter, is a multiple of this, so that what follows it is aligned."""


@dataclass(frozen=True, slots=True)
class ReduceBuffers:
    """In which gradients are added up, where compute leaves them: three for the whole gradient of a unit, and the sums.

    Backward fills one of the three, one is sent, and in one the other ranks' gradients arrive, or weights that this
    rank has no use for.
    """

    whole_pages: int
    """Each of the first two, for the widest unit."""
    landing_pages: int
    """The third."""
    header_bytes: int
    """What goes before the gradient that a rank sends another one: which parameters it is of."""
    piece: int
    """Elements that are added up at a time."""
    rows: int
    """fp32 sums of a piece that there are at once: one; with replicas, one more for each of them."""
    pages: int
    """In all."""


def reduce_buffers(layout: Layout) -> ReduceBuffers | None:
    """The buffers of one rank; None where there is nobody to share gradients with."""
    ranks, itemsize = layout.ranks, layout.offloaded_itemsize
    if ranks is None or ranks.data_parallel == 1:
        return None
    most_slots = max(len(unit.slots) for unit in layout.units)
    header = -(-most_slots // _HEADER_BYTES) * _HEADER_BYTES
    widest = 0
    for unit in layout.units:
        group = layout.group(unit)
        row = header + slice_elements(unit.trainable_numel, group) * itemsize
        widest = max(widest, group * row)
    rows = 1 if ranks.replicas == 1 else 1 + ranks.replicas
    longest = max(layout.slices.room(unit, place) for unit in layout.units for place in _places(layout, unit))
    piece = min(align(longest), max(1, BLOCK_ELEMENTS // rows // ALIGN_ELEMENTS) * ALIGN_ELEMENTS)
    whole = pages_for(widest, layout.page_bytes)
    landing = whole
    if ranks.shards_weights:
        landing = max(
            whole, *(pages_for(unit.numel * layout.weight.dtype.itemsize, layout.page_bytes) for unit in layout.units)
        )
    pages = 2 * whole + landing + pages_for(4 * rows * piece, layout.page_bytes)
    return ReduceBuffers(whole, landing, header, piece, rows, pages)


def _places(layout: Layout, unit: UnitSpec) -> range:
    """Those among the ranks that share a unit whose slices may have sizes of their own."""
    return range(layout.group(unit) if layout.slices.differ else 1)


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
