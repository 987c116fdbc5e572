"""The ledger: the account of every tier in bytes, line by line."""

from collections.abc import Sequence

from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT_BACK, Layout
from pagoda.plan.ops import DEVICE, HOST, SSD
from pagoda.plan.placement import (
    BOUNCE,
    CHECKPOINT,
    COLLECTIVE_BUFFERS,
    FETCH_RING,
    LEASES,
    RING,
    SPARE,
    STAGING,
    UNDO,
    Placement,
)


def bytes_by_state(layout: Layout, placement: Placement) -> dict[str, dict[str, int]]:
    """tier -> line -> bytes, in the order a table shows them."""
    buffers = (GRAD_QUEUE, LEASES, STAGING, RING, FETCH_RING, BOUNCE, CHECKPOINT, COLLECTIVE_BUFFERS)
    order: Sequence[str] = (*(s.name for s in layout.states), WEIGHT_BACK, GRAD, SPARE, UNDO, *buffers)
    return {
        tier: {line: pages[line] * layout.page_bytes for line in order if line in pages}
        for tier in (DEVICE, HOST, SSD)
        if (pages := placement.lines.get(tier))
    }
