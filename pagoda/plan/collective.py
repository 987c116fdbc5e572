"""The buffers for several ranks: for adding up gradients, and for passing on weights."""

from dataclasses import dataclass

from pagoda.memory.page import pages_for
from pagoda.plan.buffers import BLOCK_ELEMENTS
from pagoda.plan.layout import WEIGHT, Layout
from pagoda.plan.slices import slice_elements
from pagoda.plan.units import ALIGN_ELEMENTS, align

MESSAGE_BYTES = 4 << 20
"""Largest message in which a slice on SSD is passed on."""
_HEADER_BYTES = 256
"""A header has one byte per parameter. Its size is a multiple of this, so that the data behind it is aligned."""


@dataclass(frozen=True, slots=True)
class ReduceBuffers:
    """The buffers for adding up gradients, in the memory where compute leaves them: three for whole gradients of a
    unit, and the sums.

    Backward fills one of the three, another is sent, and the gradients of other ranks arrive in the third. Weights that
    this rank does not need arrive there too.
    """

    whole_pages: int = 0
    """Pages of each of the first two buffers, sized for the widest unit."""
    landing_pages: int = 0
    """Pages of the third buffer."""
    header_bytes: int = 0
    """Bytes of the header in front of a gradient sent to another rank. It says which parameters have a gradient."""
    piece: int = 0
    """Number of elements that are added up at a time."""
    rows: int = 0
    """Number of fp32 sums of a piece at once: one, or with replicas one more per replica."""
    pages: int = 0
    """Pages of all buffers."""


def reduce_buffers(layout: Layout) -> ReduceBuffers:
    """The buffers of one rank. They have no pages if no other rank shares its gradients."""
    ranks = layout.ranks
    if ranks.data_parallel == 1:
        return ReduceBuffers()
    most_slots = max(len(unit.slots) for unit in layout.units)
    header = -(-most_slots // _HEADER_BYTES) * _HEADER_BYTES
    widest = 0
    for unit in layout.units:
        group = layout.group(unit)
        row = header + slice_elements(unit.trainable_numel, group) * layout.offloaded_itemsize(unit)
        widest = max(widest, group * row)
    rows = 1 if ranks.replicas == 1 else 1 + ranks.replicas
    longest = max(each.updated_elements(unit) for each in layout.of_all_ranks() for unit in layout.units)
    piece = min(align(max(1, longest)), max(1, BLOCK_ELEMENTS // rows // ALIGN_ELEMENTS) * ALIGN_ELEMENTS)
    whole = pages_for(widest, layout.page_bytes)
    landing = whole
    if ranks.shards_weights:
        landing = max(whole, *(pages_for(layout.weight_bytes(unit), layout.page_bytes) for unit in layout.units))
    pages = 2 * whole + landing + pages_for(4 * rows * piece, layout.page_bytes)
    return ReduceBuffers(whole, landing, header, piece, rows, pages)


def serving_pages(layout: Layout) -> int:
    """Pages of the buffer for a slice on SSD that another rank asks for: one message, wherever it begins in a page."""
    if not layout.ranks.shards_weights:
        return 0
    widest = max(layout.pages(unit, WEIGHT) for unit in layout.units)
    return min(widest, pages_for(MESSAGE_BYTES, layout.page_bytes)) + 1
