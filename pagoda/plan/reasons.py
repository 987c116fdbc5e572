"""The reasons for a plan's choices, in sentences. Every number and every claim comes from the plan itself."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.plan.layout import GRAD, WEIGHT
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.placement import LEASES
from pagoda.plan.ranks import Ranks
from pagoda.plan.tiers import DEVICE, HOST, SSD
from pagoda.plan.units import first_limit

if TYPE_CHECKING:
    from pagoda.plan.planner import Plan

MAX_WASTE = 0.02
"""Largest share of the pages that padding may take."""
_TIERS = {DEVICE: "the device", HOST: "host RAM", SSD: "SSD"}


def reasons_for(plan: "Plan") -> Iterator[str]:
    """At least one sentence for each choice."""
    yield _units(plan)
    yield _pages(plan)
    yield from _dtypes(plan)
    yield from _device(plan)
    yield _homes(plan)
    yield from _checkpoints(plan)
    yield _state_bytes(plan)
    yield from _when_updated(plan)
    if divided := "; ".join(shared(plan.ranks)):
        yield f"{divided}."


def shared(ranks: Ranks) -> Iterator[str]:
    """What ranks divide, and over how many of them."""
    each = ranks.sharers(expert=False)
    what = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
    if each > 1:
        copies = f", in each of {ranks.replicas} copies" * (ranks.replicas > 1)
        yield f"{each} ranks divide {what[ranks.stage]} (ZeRO stage {ranks.stage}){copies}"
    elif ranks.replicas > 1:
        yield f"each of {ranks.replicas} ranks has a whole copy of the state"
    if ranks.expert_parallel > 1:
        yield f"{ranks.expert_parallel} ranks divide the experts of a layer"
    if ranks.tensor_parallel > 1:
        yield f"{ranks.tensor_parallel} ranks divide the tensors of a layer"


def _units(plan: "Plan") -> str:
    most, itemsize = max(map(plan.layout.weight_bytes, plan.units)), plan.layout.weight.dtype.itemsize
    first = first_limit(sum(slot.param.nbytes(itemsize) for unit in plan.units for slot in unit.slots))
    if plan.options.unit_limit is not None:
        why = "memory.unit_limit, or what a search found"
    elif plan.unit_limit < first:
        why = f"with {format_bytes(first)}, the budgets do not suffice"
    else:
        why = "an eighth of the weights, within limits"
    larger = ", and larger ones that cannot be divided" * (most > plan.unit_limit)
    return (
        f"{len(plan.units)} units, the largest with {format_bytes(most)} of weights: modules of at most "
        f"{format_bytes(plan.unit_limit)} ({why}){larger}."
    )


def _pages(plan: "Plan") -> str:
    if plan.options.page_bytes is not None:
        why = "memory.page_size, or what a search found"
    elif plan.page_bytes > PAGE_ALIGN:
        where = " on the rank that holds most" * plan.layout.slices.differ
        why = f"the largest size up to {format_bytes(PAGE_BYTES)} that wastes at most {MAX_WASTE:.0%} in padding{where}"
    else:
        why = f"larger ones waste more than {MAX_WASTE:.0%} in padding"
    return f"Pages of {format_bytes(plan.page_bytes)}: {why}."


def _device(plan: "Plan") -> Iterator[str]:
    """What a separate device updates, computes and is home to."""
    layout, placement, count = plan.layout, plan.placement, len(plan.units)
    if plan.budgets.device is None:
        return
    split = plan.options.split or DEFAULT_SPLIT
    if passing := placement.passing:
        others = len(_trained(plan) - placement.on_device)
        meanwhile = f" while the CPU updates {others} other{'s' * (others > 1)}" if others else ""
        yield f"{len(passing)} of {count} units are updated on the device: states pass through it{meanwhile}."
    elif split.device_update_share and not placement.on_device:
        yield f"No unit is small enough to be {split.device_update_share:.0%} of the updates, so the CPU does them all."
    if looked_up := [unit for unit in plan.units if unit.on_host]:
        names = ", ".join(f"{unit.name!r}" for unit in looked_up)
        size = format_bytes(sum(map(layout.weight_bytes, looked_up)))
        yield (
            f"The CPU looks up {names}, because "
            + ("the device has no room" if plan.options.embedding_limit is None else "memory.embedding_limit says so")
            + f": {size} of weights stay in RAM, rows go to the device, and their gradients come back."
        )
    if resident := placement.resident:
        leases = format_bytes(placement.pages(DEVICE, LEASES) * plan.page_bytes)
        yield (
            f"{len(resident)} of {count} units have all their states on the device, and need no transfers between it "
            f"and RAM. Leases of the others have {leases} there."
        )
    if passing & placement.units_with(DEVICE, [WEIGHT, GRAD]):
        weights, gradients = (len(placement.units_with(DEVICE, [state])) for state in (WEIGHT, GRAD))
        yield (
            f"The device is home to the weights of {weights} and the gradients of {gradients} of {count} units. Of the "
            "units that it updates, they move most often, so they get its memory before moments do."
        )
    if plan.options.split is not None:
        home = "what leases leave" if split.device_home_share is None else f"{split.device_home_share:.0%}"
        yield (
            f"At most {split.device_update_share:.0%} of the updates pass through the device, and {home} of its memory "
            "may be home to states (memory.split, or what a search found)."
        )


def _homes(plan: "Plan") -> str:
    """Which tiers hold states, and why these."""
    layout, placement, options = plan.layout, plan.placement, plan.options
    kept = [(WEIGHT, "weights", [WEIGHT])]
    if layout.moments:
        kept.append(("moments", "moments", [state.name for state in layout.moments]))
    on_ssd = {name: len(plan.units_holding(SSD, states)) for _, name, states in kept}
    if any(on_ssd.values()):
        counts = " and ".join(f"the {name} of {units}" for name, units in on_ssd.items())
        gradients = [] if options.update_during_backward or options.asynchronous else ["gradients"]
        first, *then = ["weights", *gradients, *["moments"] * bool(layout.moments)]
        order = "".join(f", then to {name}" for name in then)
        return (
            f"SSD holds {counts} of {len(plan.units)} units. RAM goes to {first} first, which move most often{order}; "
            "of each, to units in the order of forward, which have little time for their updates, as far as they fit."
        )
    names = [state.name for state in layout.states]
    tiers = [name for tier, name in _TIERS.items() if plan.units_holding(tier, names)]
    if tiers == [_TIERS[HOST]]:
        said = "Every state fits in host RAM"
    else:
        said = f"{' and '.join(tiers)} {'hold' if len(tiers) > 1 else 'holds'} every state"
        said = said[0].upper() + said[1:]
    if placement.pages(SSD, GRAD):
        said += "; SSD keeps room for gradients that cannot be used at once"
    return f"{said}."


def _checkpoints(plan: "Plan") -> Iterator[str]:
    """How state on SSD is saved."""
    placement, options = plan.placement, plan.options
    state, spare = placement.changing_on_ssd, placement.spare_on_ssd
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
            f"The {format_bytes(plan.budgets.ssd or 0)} of SSD that the run may use have no room for the pages of a "
            f"checkpoint, {format_bytes(state * plan.page_bytes)} more: state on SSD is copied to save it."
        )


def _dtypes(plan: "Plan") -> Iterator[str]:
    """The dtypes of weights, if there are several."""
    layout = plan.layout
    if len(layout.dtypes) == 1:
        return
    numel = dict.fromkeys(layout.dtypes, 0)
    for unit in layout.units:
        numel[layout.dtype(unit, WEIGHT)] += sum(slot.param.numel for slot in unit.slots)
    parts = [f"{count:,} parameters in {str(dtype).removeprefix('torch.')}" for dtype, count in numel.items()]
    yield f"The model has {' and '.join(parts)}; each keeps its dtype, in units of its own."


def _state_bytes(plan: "Plan") -> str:
    """Bytes per trained parameter, without gradients and padding."""
    each = plan.layout.bytes_per_parameter
    kept = {name: size for name, size in each.items() if size >= 0.005}
    states = ", ".join(f"{name} {size:.2f}".rstrip("0").rstrip(".") for name, size in kept.items())
    frozen = any(unit.trainable_numel < unit.numel for unit in plan.units)
    return f"State takes {sum(each.values()):.2f} bytes a {'trained ' * frozen}parameter: {states}."


def _when_updated(plan: "Plan") -> Iterator[str]:
    options, placement, count = plan.options, plan.placement, len(plan.units)
    if options.asynchronous:
        yield (
            "Units are updated while forward and backward run on (asynchronous updates): weights lag one step, for "
            "which the gradients of 2 steps are kept, and weights have room for two versions."
        )
        return
    trained = _trained(plan)
    each = "Each unit" if len(trained) == count else "Each unit that trains"
    if options.update_during_backward:
        yield f"{each} is updated during backward, as soon as its last gradient has arrived."
        return
    others = trained - placement.speculated
    if ahead := placement.speculated:
        in_ram = len(ahead - plan.units_holding(SSD, [state.name for state in plan.layout.states]))
        of_them = f" ({in_ram} of them with all their states in RAM)" if in_ram else ""
        decided = "gradients are clipped" if options.clipping else "a scaled gradient is not finite"
        yield (
            f"{len(ahead)} of {count} units{of_them} are updated during backward, before it is known whether "
            f"{decided}: there is room for their old and their new states until then."
        )
    if others:
        which = f"The other{'s' * (len(others) > 1)}" if ahead else each
        are, they = ("are", "them") if ahead and len(others) > 1 else ("is", "it")
        why = _why_last(options, plan.layout.shares_experts)
        yield f"{which} {are} updated after backward ({why}), just before the next forward uses {they}."


def _why_last(options: Options, shares_experts: bool) -> str:
    """Why updates cannot begin during backward."""
    if options.gradient_accumulation_steps is None:
        if shares_experts:
            return "which experts other ranks use is known only then"
        return "the number of backward passes is not announced"
    if options.clipping:
        return "the norm for clipping is known only then"
    return "whether a scaled gradient is not finite is known only then"


def _trained(plan: "Plan") -> frozenset[int]:
    """The units that have updates."""
    return frozenset(unit.index for unit in plan.units if unit.trainable_numel)
