"""Updates on a device of its own: which units' states pass it, and what that takes of its memory.

States stay at home in RAM. Block by block they go to a ring on the device, with the gradient, are updated there and
come back, while the CPU updates other units.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from pagoda.memory.page import pages_for
from pagoda.plan.combinations import Feature, features, why_not
from pagoda.plan.layout import GRAD, Layout
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.units import UnitSpec

UPDATE_RING = "update_ring"
"""The line of the plan for the device's buffers."""
DEVICE_SLOTS = 4
"""Blocks on the device at once: one comes, one is updated, one goes, one to spare."""
_ALIGN = 256
"""Bytes: what every part of a slot starts on, as CUDA's own allocations do."""
_WHOLE_SLOTS = 2
"""Blocks on the device at once where a block is a whole parameter."""
WORK = "work"
"""fp32 copies of gradient and master, for a rule that computes on them."""


def why_not_on_device(feature: Feature, layout: Layout, options: Options, device: int | None) -> str | None:
    """Why the device, whose budget is `device`, cannot update units, or be home to any; None where it can."""
    if device is None:
        return "compute has no memory of its own: give memory.device"
    share = (options.split or DEFAULT_SPLIT).device_update_share
    if layout.weight.copied and share != 1:
        return (
            "Muon, or a class of torch, adds up in another order on a GPU. So all of its updates run there, or none: "
            "set split.device_update_share to 1"
        )
    return why_not(features(options, layout.states, layout.ranks) | {feature})


def slot_count(layout: Layout) -> int:
    """Blocks on the device at once; few where a block is a whole parameter: one is updated while the other moves."""
    return DEVICE_SLOTS if layout.weight.whole is None else _WHOLE_SLOTS


def slot_offsets(layout: Layout) -> tuple[Mapping[str, int], int]:
    """Where each state of a block starts in its slot, the gradient (`GRAD`) and the work area (`WORK`), and where the
    slot ends; in bytes."""
    sizes = {state.name: layout.most_in_block(state) * state.dtype.itemsize for state in layout.states}
    sizes |= {GRAD: layout.block_elements * layout.itemsize(GRAD), WORK: 4 * layout.work_elements}
    *starts, end = accumulate((-(-nbytes // _ALIGN) * _ALIGN for nbytes in sizes.values()), initial=0)
    return dict(zip(sizes, starts, strict=True)), end


def slot_pages(layout: Layout) -> int:
    """Pages of one slot."""
    return pages_for(slot_offsets(layout)[1], layout.page_bytes)


def on_device(units: Iterable[UnitSpec], share: float) -> frozenset[int]:
    """The units, of those given, that are updated on the device: `share` of their parameters, spread evenly over the
    order of forward, so that at any time both sides have some to do."""
    chosen, so_far, taken = set(), 0, 0
    for unit in units:
        so_far += unit.trainable_numel
        if taken + unit.trainable_numel <= share * so_far:
            chosen.add(unit.index)
            taken += unit.trainable_numel
    return frozenset(chosen)
