"""Updates on a separate device: which units' states pass it, and how much of its memory that takes.

States come from their home block by block to slots on the device, with the gradient, are updated there and go back,
while the CPU updates other units.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from pagoda.memory.page import pages_for
from pagoda.plan.buffers import DEVICE_SLOTS, WHOLE_SLOTS
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.units import UnitSpec

UPDATE_RING = "update_ring"
"""The line of the plan for the device's slots."""
_ALIGN = 256
"""Every part of a slot starts at a multiple of this many bytes, as CUDA's own allocations do."""
WORK = "work"
"""fp32 copies of gradient and master, for a rule that computes on them."""


def why_not_on_device(layout: Layout, options: Options, device: int | None) -> str | None:
    """Why the device, with the budget `device`, cannot update units or be home to any. None if it can."""
    if device is None:
        return "compute has no memory of its own: give memory.device"
    share = (options.split or DEFAULT_SPLIT).device_update_share
    if layout.weight.copied and share != 1:
        return (
            "Muon, or a class of torch, adds up in another order on a GPU. So all of its updates run there, or none: "
            "set split.device_update_share to 1"
        )
    return None


def slot_count(layout: Layout) -> int:
    """Number of blocks on the device at once. If a block is a whole parameter, one is updated while the other moves."""
    return DEVICE_SLOTS if layout.weight.whole is None else WHOLE_SLOTS


def slot_offsets(layout: Layout) -> tuple[Mapping[str, int], int]:
    """Offset in a slot, in bytes, of each state of a block, of the gradient (`GRAD`) and of the work area (`WORK`); and
    the size of the slot."""
    sizes = {state.name: layout.most_in_block(state) * layout.widest(state.name) for state in layout.states}
    sizes |= {GRAD: layout.block_elements * layout.widest(GRAD), WORK: 4 * layout.work_elements}
    *starts, end = accumulate((-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes.values()), initial=0)
    return dict(zip(sizes, starts, strict=True)), end


def slot_pages(layout: Layout) -> int:
    """Pages of one slot."""
    return pages_for(slot_offsets(layout)[1], layout.page_bytes)


def on_device(units: Iterable[UnitSpec], share: float) -> frozenset[int]:
    """The units that are updated on the device: `share` of the parameters of `units`, spread evenly over forward, so
    that both sides always have work."""
    chosen, so_far, taken = set(), 0, 0
    for unit in units:
        so_far += unit.trainable_numel
        if taken + unit.trainable_numel <= share * so_far:
            chosen.add(unit.index)
            taken += unit.trainable_numel
    return frozenset(chosen)
