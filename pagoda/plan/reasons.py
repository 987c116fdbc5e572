"""What a plan says of its choices, in sentences."""

from collections.abc import Iterator

from pagoda.memory.sizes import format_bytes
from pagoda.plan.device_updates import why_no_device_updates
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.ops import SSD
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.placement import SPARE, UNDO, Budgets, Placement
from pagoda.plan.ranks import Ranks

MAX_WASTE = 0.02
"""Share of the pages that padding may take."""


def reasons_for(
    layout: Layout, budgets: Budgets, placement: Placement, options: Options, unit_limit: int
) -> tuple[str, ...]:
    """One sentence or more on each choice. `unit_limit` is the one that the units were made with, in bytes."""
    largest = format_bytes(max(unit.numel for unit in layout.units) * layout.weight.dtype.itemsize)
    limited = "(as set)" if options.unit_limit else "(an eighth of the model, less where the budget is tight)"
    padding = " (as set)." if options.page_bytes else f": the largest that waste at most {MAX_WASTE:.0%} in padding."
    reasons = [
        f"{len(layout.units)} units, the largest of {largest}: modules of at most {format_bytes(unit_limit)} of "
        f"weights {limited}, and larger ones that have no parts.",
        f"Pages of {format_bytes(layout.page_bytes)}{padding}",
        *reasons_for_homes(layout, budgets, placement, options),
        _state_bytes(layout),
    ]
    if options.split is not None and len(placement.lines) > 1:
        reasons.append(str(options.split))
    reasons.append(_when_updated(options))
    if layout.ranks is not None:
        reasons.append(_shared(layout.ranks))
    return tuple(reasons)


def reasons_for_homes(layout: Layout, budgets: Budgets, placement: Placement, options: Options) -> Iterator[str]:
    """Why extents have the homes that they have, and what is kept beside them."""
    count = len(layout.units)
    if placement.updated_on_device:
        yield (
            f"{len(placement.updated_on_device)} of {count} units are updated on the device: their states pass it "
            "while the CPU updates the others."
        )
    elif (options.split or DEFAULT_SPLIT).device_update_share and not why_no_device_updates(
        layout, options, budgets.device
    ):
        yield "No unit is updated on the device: that takes all of its states in RAM."
    if placement.resident:
        yield (
            f"{len(placement.resident)} of {count} units have all their states on the device, which has room for "
            "them beside leases: they need no transfers."
        )
    moments = [state.name for state in layout.moments]
    weights_on_ssd = len(placement.units_with(SSD, [WEIGHT]))
    moments_on_ssd = len(placement.units_with(SSD, moments))
    if weights_on_ssd or moments_on_ssd:
        yield (
            f"SSD holds the weights of {weights_on_ssd} and the moments of {moments_on_ssd} of {count} units: RAM goes "
            "first to weights (most transfers per byte), then gradients, then moments, in forward order (least slack)."
        )
    elif SSD in placement.lines:
        yield "Weights and moments fit in host RAM; SSD keeps room for gradients that cannot be used at once."
    else:
        yield "Every state fits in host RAM; SSD is not used."
    if placement.speculated:
        whole = placement.speculated - placement.units_with(SSD, [WEIGHT, *moments])
        yield (
            f"{len(placement.speculated)} of {count} units, {len(whole)} of them with all their states in RAM, are "
            "updated under backward as if nothing would be clipped, and their old states kept until that is known."
        )
    spare = placement.pages(SSD, SPARE)
    state = sum(pages for line, pages in placement.lines.get(SSD, {}).items() if line not in (GRAD, SPARE, UNDO))
    if spare:
        keep = spare // state
        yield (
            f"SSD has room to keep the pages of {keep} checkpoint{'s' * (keep > 1)} beside those in use, so that "
            "state on SSD is saved without copying it."
        )
    elif state:
        yield "SSD has no room for the pages of a checkpoint: state on SSD is copied to save it."


def _state_bytes(layout: Layout) -> str:
    """What a trained parameter takes, gradients and padding aside."""
    kept = {name: size for name, size in layout.bytes_per_parameter.items() if size >= 0.005}
    states = ", ".join(f"{name} {size:.2f}".rstrip("0").rstrip(".") for name, size in kept.items())
    total = sum(layout.bytes_per_parameter.values())
    return f"State takes {total:.2f} bytes a parameter: {states}."


def _when_updated(options: Options) -> str:
    if options.max_staleness is not None:
        return (
            "Units are updated while forward and backward run on (update='async'): weights lag at most "
            f"{options.max_staleness} steps, for which RAM keeps the gradients of {options.max_staleness + 1} steps, "
            "and every weight has a second extent."
        )
    if options.update_under_backward:
        return "Units are updated under backward, as soon as their last gradient has arrived."
    why = "the number of backward passes is not announced"
    if options.clipping:
        why = "the clipped norm is known only then"
    elif options.may_skip and options.accumulation_steps is not None:
        why = "whether a scaled gradient is not finite is known only then"
    return f"Units are updated after backward ({why}), just before the next forward needs each."


def _shared(ranks: Ranks) -> str:
    what = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
    experts = f"; experts over {ranks.expert_parallel}" if ranks.expert_parallel > 1 else ""
    tensors = f"; tensors over {ranks.tensor_parallel}" if ranks.tensor_parallel > 1 else ""
    said = f"share out {what[ranks.stage]} (ZeRO stage {ranks.stage})"
    return f"{ranks.data_parallel} ranks {said}{experts}{tensors}."
