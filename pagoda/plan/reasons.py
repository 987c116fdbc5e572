"""The reasons for a plan's choices, in sentences."""

from collections.abc import Iterator

from pagoda.memory.sizes import format_bytes
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.placement import SPARE, Budgets, Placement
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import DEVICE, SSD

MAX_WASTE = 0.02
"""Largest share of the pages that padding may take."""


def reasons_for(
    layout: Layout, placement: Placement, budgets: Budgets, options: Options, unit_limit: int
) -> tuple[str, ...]:
    """At least one sentence for each choice. `unit_limit` is the limit in bytes with which the units were made."""
    largest = format_bytes(max(map(layout.weight_bytes, layout.units)))
    limited = "memory.unit_limit" if options.unit_limit else "an eighth of the model, or less if the budget is tight"
    least_waste = f"the largest that waste at most {MAX_WASTE:.0%} in padding"
    reasons = [
        f"{len(layout.units)} units, the largest with {largest} of weights: modules of at most "
        f"{format_bytes(unit_limit)} ({limited}), and larger ones that cannot be divided.",
        f"Pages of {format_bytes(layout.page_bytes)}: {'memory.page_size' if options.page_bytes else least_waste}.",
        *_dtypes(layout),
        *reasons_for_homes(layout, placement, budgets, options),
        _state_bytes(layout),
    ]
    if options.split is not None and len(placement.lines) > 1:
        reasons.append(str(options.split))
    reasons.append(_when_updated(options, layout))
    if layout.ranks.count > 1:
        reasons.append(_shared(layout.ranks))
    return tuple(reasons)


def reasons_for_homes(layout: Layout, placement: Placement, budgets: Budgets, options: Options) -> Iterator[str]:
    """Why each state has its home, and how the rest of each tier is used."""
    count = len(layout.units)
    if placement.passing:
        yield (
            f"{len(placement.passing)} of {count} units are updated on the device: their states "
            "pass through it while the CPU updates the other units."
        )
    elif (options.split or DEFAULT_SPLIT).device_update_share:
        yield "No unit is updated on the device, because none has all of its states in RAM."
    if looked_up := [unit for unit in layout.units if unit.on_host]:
        names = ", ".join(f"{unit.name!r}" for unit in looked_up)
        size = format_bytes(sum(map(layout.weight_bytes, looked_up)))
        yield (
            f"The CPU looks up {names}, because "
            + ("the device has no room" if options.embedding_limit is None else "memory.embedding_limit says so")
            + f": {size} of weights stay in RAM, rows go to the device, and their gradients come back."
        )
    if placement.resident:
        yield (
            f"{len(placement.resident)} of {count} units have all their states on the device, which has room for "
            "them and for the leases of the others. They need no transfers."
        )
    if placement.passing & placement.units_with(DEVICE, [WEIGHT, GRAD]):
        weights, gradients = (len(placement.units_with(DEVICE, [state])) for state in (WEIGHT, GRAD))
        yield (
            f"The device is home to the weights of {weights} and the gradients of {gradients} of {count} units. Of the "
            "units that it updates, they move most often, so they get its memory before moments do."
        )
    moments = [state.name for state in layout.moments]
    weights_on_ssd = len(placement.units_with(SSD, [WEIGHT]))
    moments_on_ssd = len(placement.units_with(SSD, moments))
    if weights_on_ssd or moments_on_ssd:
        yield (
            f"SSD holds the weights of {weights_on_ssd} and the moments of {moments_on_ssd} of {count} units. RAM goes "
            "to weights first, which move most often, then to gradients, then to moments; of each, to the units that "
            "forward uses first, which have the least time for their updates."
        )
    elif SSD in placement.lines:
        yield "Weights and moments fit in host RAM; SSD keeps room for gradients that cannot be used at once."
    else:
        yield "Every state fits in host RAM."
    if placement.speculated:
        whole = placement.speculated - placement.units_with(SSD, [WEIGHT, *moments])
        of_them = f" ({len(whole)} of them with all their states in RAM)" if whole else ""
        yield (
            f"{len(placement.speculated)} of {count} units{of_them} are updated during backward, before it is known "
            "whether gradients are clipped. There is room for their old and their new states until then."
        )
    spare = placement.pages(SSD, SPARE)
    state = placement.changing_on_ssd(layout)
    if spare:
        keep = spare // state
        yield (
            f"SSD has room for the pages of {keep} checkpoint{'s' * (keep > 1)} and for those in use, so that state on "
            "SSD is saved without copying it. Further checkpoints that are kept at once copy it."
        )
    elif state and options.keep_checkpoints is not None:
        yield "SSD sets no room aside for the pages of a checkpoint: state on SSD is copied to save it."
    elif state:
        yield (
            f"The {format_bytes(budgets.ssd or 0)} of SSD that the run may use have no room for the pages of a "
            f"checkpoint, {format_bytes(state * layout.page_bytes)} more: state on SSD is copied to save it."
        )


def _dtypes(layout: Layout) -> Iterator[str]:
    """The dtypes of weights, if there are several."""
    if len(layout.dtypes) == 1:
        return
    numel = dict.fromkeys(layout.dtypes, 0)
    for unit in layout.units:
        numel[layout.dtype(unit, WEIGHT)] += sum(slot.param.numel for slot in unit.slots)
    parts = [f"{count:,} parameters in {str(dtype).removeprefix('torch.')}" for dtype, count in numel.items()]
    yield f"The model has {' and '.join(parts)}; each keeps its dtype, in units of its own."


def _state_bytes(layout: Layout) -> str:
    """Bytes per trained parameter, without gradients and padding."""
    kept = {name: size for name, size in layout.bytes_per_parameter.items() if size >= 0.005}
    states = ", ".join(f"{name} {size:.2f}".rstrip("0").rstrip(".") for name, size in kept.items())
    total = sum(layout.bytes_per_parameter.values())
    frozen = any(unit.trainable_numel < unit.numel for unit in layout.units)
    return f"State takes {total:.2f} bytes a {'trained ' * frozen}parameter: {states}."


def _when_updated(options: Options, layout: Layout) -> str:
    if options.max_staleness is not None:
        return (
            "Units are updated while forward and backward run on (asynchronous updates): weights lag at most "
            f"{options.max_staleness} steps, for which RAM keeps the gradients of {options.max_staleness + 1} steps, "
            "and every weight has a second extent."
        )
    if options.update_during_backward:
        return "Each unit is updated during backward, as soon as its last gradient has arrived."
    why = "the number of backward passes is not announced"
    if layout.shares_experts:
        why = "which experts other ranks use is known only then"
    elif options.clipping:
        why = "the norm for clipping is known only then"
    elif options.may_skip and options.accumulation_steps is not None:
        why = "whether a scaled gradient is not finite is known only then"
    return f"Each unit is updated after backward ({why}), just before the next forward uses it."


def _shared(ranks: Ranks) -> str:
    what = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
    experts = f"; experts over {ranks.expert_parallel}" if ranks.expert_parallel > 1 else ""
    tensors = f"; tensors over {ranks.tensor_parallel}" if ranks.tensor_parallel > 1 else ""
    return f"{ranks.data_parallel} ranks divide {what[ranks.stage]} (ZeRO stage {ranks.stage}){experts}{tensors}."
