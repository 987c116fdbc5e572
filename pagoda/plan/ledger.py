"""The ledger: the account of every tier in bytes, line by line."""

from collections.abc import Sequence

from pagoda.plan.activations import ActivationBytes
from pagoda.plan.device_updates import UPDATE_RING
from pagoda.plan.layout import GRAD, GRAD_QUEUE, WEIGHT_BACK, Layout
from pagoda.plan.ops import DEVICE, HOST, SSD
from pagoda.plan.placement import (
    ACTIVATIONS,
    BOUNCE,
    CHECKPOINT,
    COLLECTIVE_BUFFERS,
    FETCH_RING,
    LEASES,
    RING,
    SERVING,
    SPARE,
    STAGING,
    UNDO,
    WORK,
    Placement,
)


def bytes_by_state(
    layout: Layout, placement: Placement, activations: ActivationBytes | None = None
) -> dict[str, dict[str, int]]:
    """tier -> line -> bytes, in the order a table shows them; `activations` says how much is offloaded, once known."""
    buffers = (
        GRAD_QUEUE,
        LEASES,
        UPDATE_RING,
        STAGING,
        RING,
        FETCH_RING,
        BOUNCE,
        CHECKPOINT,
        WORK,
        COLLECTIVE_BUFFERS,
        SERVING,
        ACTIVATIONS,
    )
    order: Sequence[str] = (*(s.name for s in layout.states), WEIGHT_BACK, GRAD, SPARE, UNDO, *buffers)
    account = {
        tier: {line: pages[line] * layout.page_bytes for line in order if line in pages}
        for tier in (DEVICE, HOST, SSD)
        if (pages := placement.lines.get(tier))
    }
    offloaded = {HOST: activations.host, SSD: activations.ssd} if activations is not None else {}
    for tier, nbytes in offloaded.items():
        if nbytes:
            lines = account.setdefault(tier, {})
            lines[ACTIVATIONS] = lines.get(ACTIVATIONS, 0) + nbytes
    return account
