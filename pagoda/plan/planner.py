"""The planner: from a module tree, an optimizer's states and budgets to an immutable plan."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.page import PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.optim.rule import StateSpec
from pagoda.plan.activations import ActivationMode, ActivationPlan, SavedBlocks
from pagoda.plan.device_updates import why_no_device_updates
from pagoda.plan.exchanges import exchange_ops
from pagoda.plan.layout import BLOCK_ELEMENTS, GRAD, WEIGHT, Layout
from pagoda.plan.ledger import bytes_by_state
from pagoda.plan.offloading import move_ops, offload_room, plan_activations
from pagoda.plan.ops import DEVICE, GRADIENTS_IN_FLIGHT_BYTES, HOST, LARGE_TRANSFER_BYTES, SSD, Op
from pagoda.plan.placement import LEASES, Budgets, Placement, place
from pagoda.plan.ranks import Ranks
from pagoda.plan.split import USUAL_SPLIT, Split
from pagoda.plan.trace import Trace, assumed_trace
from pagoda.plan.units import ModuleSpec, UnitSpec, discover, forward_uses, is_within

_MAX_UNIT_BYTES = 512 << 20
_MIN_UNIT_BYTES = 64 << 10
_UNITS_WANTED = 8
_MAX_WASTE = 0.02
_MIN_PAGE_BYTES = 4096
_BUFFERS = ((BLOCK_ELEMENTS, 2), (BLOCK_ELEMENTS // 2, 2), (BLOCK_ELEMENTS // 4, 2), (BLOCK_ELEMENTS // 8, 1))
"""(elements of a streamed block, gradients in the staging region): what to try, from roomy to tight."""

_CHECKED = (DEVICE, HOST, SSD)
"""Tiers in the order in which `place` checks their budgets."""


@dataclass(frozen=True)
class Options:
    """What the user fixed; None leaves the choice to the planner."""

    page_bytes: int | None = None
    unit_limit: int | None = None
    accumulation_steps: int | None = None
    """Micro-batches per step, if announced."""
    clipping: bool = False
    split: Split | None = None
    """How host RAM is divided where not everything fits it."""
    keep_checkpoints: int | None = None
    """Checkpoints whose pages on SSD are kept at once; None: one where there is room."""
    max_staleness: int | None = None
    """Bound of asynchronous updates, in steps; None: every update ends before the next forward of its unit."""
    speculate: bool | None = None
    """Update under backward as if nothing would be clipped: False never, None where there is room to undo it, True even
    at the cost of moments in RAM, and where all states are there."""
    activations: ActivationMode = "keep"
    """What becomes of activations."""
    partition_activations: bool = False
    """Whether tensor-parallel ranks keep a part each of what blocks that are recomputed are given."""
    activation_bytes: int | None = None
    """Most bytes of activations beside the pages, where that is to be chosen; None for no limit."""
    gradients: torch.dtype | None = None
    """What gradients are accumulated in; None: what weights have."""
    may_skip: bool = False
    """Whether a step is skipped where a gradient is not finite, as with dynamic loss scaling."""
    activations_limited: bool = False
    """Whether the user set `activation_bytes`, so that more is refused."""

    @property
    def update_under_backward(self) -> bool:
        """True when a gradient is known to be final, and its scale too, as soon as it has arrived."""
        return self._announced and not self._decided_last

    @property
    def may_offload(self) -> bool:
        """True when activations may leave the memory that compute uses."""
        return self.activations not in ("keep", "recompute")

    @property
    def may_speculate(self) -> bool:
        """True when a gradient is known to be final as soon as it has arrived, but not its scale."""
        return self._announced and self._decided_last and self.speculate is not False

    @property
    def _announced(self) -> bool:
        return self.accumulation_steps is not None and self.max_staleness is None

    @property
    def _decided_last(self) -> bool:
        """Whether only the end of backward shows what the gradients are multiplied by, or that they do not count."""
        return self.clipping or self.may_skip


@dataclass(frozen=True)
class Plan:
    """Where each extent lives, and what a step uses in which order. Nothing in it changes; see `retraced`."""

    layout: Layout
    budgets: Budgets
    placement: Placement
    options: Options
    trace: Trace
    reasons: tuple[str, ...]
    activations: ActivationPlan | None = None
    """What becomes of activations, once their sizes are known: from a step, or an estimate."""
    exchanges: Mapping[str, int] = field(default_factory=dict)
    """Module whose children are experts -> bytes of tokens that this rank sends to it, and gets from it, in forward."""

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.layout.units

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def parameters(self) -> int:
        """Parameters of the model, each tied one counted once."""
        return sum(slot.param.numel for unit in self.units for slot in unit.slots)

    @cached_property
    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """tier -> state -> bytes: what each tier holds at its peak, in whole pages."""
        return bytes_by_state(self.layout, self.placement, None if self.activations is None else self.activations.peak)

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        """tier -> bytes: the sum of its lines."""
        return {tier: sum(lines.values()) for tier, lines in self.bytes.items()}

    @cached_property
    def exchanges_at(self) -> Mapping[int, tuple[Op, ...]]:
        """tick -> ALL_TO_ALL ops of that access."""
        return _by_tick(exchange_ops(self.units, self.exchanges, self.trace))

    @cached_property
    def activations_at(self) -> Mapping[int, tuple[Op, ...]]:
        """tick -> SAVE or RETURN ops of that access."""
        activations = self.activations
        return {} if activations is None or not activations.moves else _by_tick(move_ops(activations, self.trace))

    @property
    def needs_leases(self) -> bool:
        return self.lease_tier is not None

    @property
    def ranks(self) -> Ranks | None:
        return self.layout.ranks

    @property
    def lease_tier(self) -> str | None:
        """Where leases take frames: the device if it is a memory of its own, else host RAM for weights on SSD."""
        if self.budgets.device is not None:
            return DEVICE
        return HOST if self.placement.pages(HOST, LEASES) else None

    @property
    def gradients_in_flight_bytes(self) -> int:
        """Most bytes of gradients on their way to their extents at once.

        From a device of its own, a gradient that is larger by itself need not be waited for: the estimate of
        activations has room for two of the largest. Several ranks have their buffers.
        """
        if self.layout.collective_pages:
            return self.layout.whole_gradient_pages * self.page_bytes
        if self.budgets.device is None:
            return GRADIENTS_IN_FLIGHT_BYTES
        trainable = (slot.param for unit in self.units for slot in unit.slots if slot.param.trainable)
        largest = max((param.numel for param in trainable), default=0)
        return max(GRADIENTS_IN_FLIGHT_BYTES, largest * self.layout.offloaded_itemsize)

    @property
    def transfer_bytes(self) -> int:
        """Bytes that updates read from SSD, or write to it, at a time: the mean. The largest where none do."""
        layout = self.layout
        nbytes = transfers = 0
        for unit in self.units:
            elements = layout.updated_elements(unit)
            for state in layout.states:
                if elements and self.placement.home(unit.index, state.name) == SSD:
                    nbytes += state.nbytes(elements)
                    transfers += -(-elements // layout.block_elements)
        return nbytes // transfers if transfers else LARGE_TRANSFER_BYTES

    def leased_pages(self) -> dict[int, int]:
        """unit -> frames of its lease, for units whose weights are not used where they live."""
        everywhere = self.budgets.device is not None or (self.ranks is not None and self.ranks.shards_weights)
        return {
            unit.index: self.layout.lease_of(unit)
            for unit in self.units
            if (everywhere or self.placement.home(unit.index, WEIGHT) == SSD)
            and unit.index not in self.placement.resident
        }

    @property
    def lease_slab(self) -> int:
        """Frames of a slab of the leases: the widest lease, or all there are where every lease fits at once."""
        frames = self.placement.pages(self.lease_tier or HOST, LEASES)
        pages = self.leased_pages().values()
        return frames if sum(pages) <= frames else max(pages)

    def retraced(self, trace: Trace) -> "Plan":
        """The same placement, with another trace."""
        return replace(self, trace=trace)


def make_plan(
    root: ModuleSpec,
    states: tuple[StateSpec, ...],
    budgets: Budgets,
    options: Options,
    ranks: Ranks | None = None,
    exchanges: Mapping[str, int] | None = None,
    rank: int | None = None,
    saved: SavedBlocks | None = None,
) -> Plan:
    """Choose units, page size and placement, and assume a step.

    With `saved`, an estimate, what policies offload is in the account, and so are its moves.

    With `ranks`, the plan and its budgets are those of one of them. If they divide experts, `root` has only the experts
    of one rank, and `exchanges` the bytes of tokens that it sends to other ranks' experts in one forward, by the
    module whose children are the experts. Where ranks hold other numbers of elements (`Slices`), it is the plan of
    `rank`, or of the one that holds most; units and pages are those that are good for the latter, so alike everywhere.

    Raises BudgetError, naming tier, shortfall and setting, when no choice fits; ConfigError for a split whose share of
    updates or homes on the device cannot be had.
    """
    params = list(root.walk())
    if not params:
        raise BudgetError("The model has no floating-point parameters, so there is nothing to train in pages.")
    itemsize = states[0].dtype.itemsize
    total = sum(p.numel for p in params) * itemsize
    limit = options.unit_limit or max(_MIN_UNIT_BYTES, min(_MAX_UNIT_BYTES, total // _UNITS_WANTED))
    expert_modules = frozenset(root.experts())
    refusals: list[BudgetError] = []
    while True:
        units = discover(root, limit, itemsize)
        experts = frozenset(unit.index for unit in units if is_within(unit.module, expert_modules))
        draft = Layout(
            units,
            states,
            PAGE_BYTES,
            ranks=ranks,
            expert_units=experts,
            max_staleness=options.max_staleness,
            offloads=options.may_offload,
            gradient=options.gradients,
        )
        try:
            paged = _paged(replace(draft, rank=draft.slices.fullest_rank), options.page_bytes)
            layout, placement = _fit(paged, budgets, options)
            break
        except BudgetError as refusal:
            refusals.append(refusal)
        smaller = _next_limit(units, limit, itemsize)
        if options.unit_limit is not None or smaller is None:
            raise _with_advice(_least(refusals), units, itemsize, budgets)
        limit = smaller
    if rank is not None and layout.slices.differ:
        layout, placement = _fit(replace(paged, rank=rank), budgets, options)
    largest = format_bytes(max(unit.numel for unit in units) * itemsize)
    reasons = (
        f"{len(units)} units, the largest of {largest}: modules of at most {format_bytes(limit)} of weights "
        + ("(as set)" if options.unit_limit else "(an eighth of the model, less where the budget is tight)")
        + ", and larger ones that have no parts.",
        f"Pages of {format_bytes(layout.page_bytes)}"
        + (" (as set)." if options.page_bytes else f": the largest that waste at most {_MAX_WASTE:.0%} in padding."),
        *placement.reasons,
        _state_bytes(layout),
        *([str(options.split)] if options.split is not None and len(placement.lines) > 1 else []),
        _when(options),
        *([_shared(ranks)] if ranks is not None else []),
    )
    uses = forward_uses(root, units)
    trace = assumed_trace([use.unit for use in uses], options.accumulation_steps or 1)
    activations = None
    if saved is not None:
        activations = plan_activations(root, uses, saved, offload_room(layout, placement, budgets))
    return Plan(layout, budgets, placement, options, trace, reasons, activations, dict(exchanges or {}))


def _by_tick(ops: Iterable[Op]) -> Mapping[int, tuple[Op, ...]]:
    ticks: dict[int, list[Op]] = {}
    for op in ops:
        ticks.setdefault(op.tick, []).append(op)
    return {tick: tuple(of_tick) for tick, of_tick in ticks.items()}


def _fit(layout: Layout, budgets: Budgets, options: Options) -> tuple[Layout, Placement]:
    """A placement, with smaller streaming buffers where the budget is tight."""
    refusals: list[BudgetError] = []
    split = options.split or USUAL_SPLIT
    refused = why_no_device_updates(layout, budgets.device)
    for name in ("device_update_share", "device_home_share"):
        if refused is not None and getattr(split, name):
            raise ConfigError(
                f"split.{name} is {getattr(split, name)}, but {refused}. Leave it at 0 (memory.split=None chooses)."
            )
    if options.speculate:
        split = replace(split, undo_first=True, undo_in_ram=True)
    splits = [split]
    if options.split is None and refused is None:  # where RAM and SSD do not hold all, the device may
        splits.append(replace(split, device_home_share=1.0))
    for split, (block_limit, staging_buffers) in product(splits, _BUFFERS):
        candidate = layout.with_block_limit(block_limit)
        try:
            return candidate, place(
                candidate,
                budgets,
                options.update_under_backward,
                staging_buffers,
                split,
                options.keep_checkpoints,
                options.may_speculate,
                options.accumulation_steps is not None and options.accumulation_steps > 1,
            )
        except BudgetError as refusal:
            refusals.append(refusal)
    raise _least(refusals)


def _least(refusals: list[BudgetError]) -> BudgetError:
    """Of the refusals in which most tiers were found to be enough, the one that asks for least."""
    furthest = max(_CHECKED.index(r.tier or DEVICE) for r in refusals)
    return min((r for r in refusals if r.tier == _CHECKED[furthest]), key=lambda r: r.needed_bytes or 0)


def _with_advice(refusal: BudgetError, units: tuple[UnitSpec, ...], itemsize: int, budgets: Budgets) -> BudgetError:
    """A refusal that says what helps where one parameter is too much."""
    largest = max(units, key=lambda unit: unit.numel)
    nbytes = largest.numel * itemsize
    has = {DEVICE: budgets.device, HOST: budgets.host}.get(refusal.tier or "")
    if len(largest.slots) > 2 or has is None or 2 * nbytes < has:
        return refusal
    return BudgetError(
        f"{refusal} The layer {largest.name!r} alone takes {format_bytes(nbytes)}: with wrap(tile_limit=...), linear "
        "layers, embeddings and stacks of experts are fetched in tiles.",
        tier=refusal.tier,
        needed_bytes=refusal.needed_bytes,
    )


def _when(options: Options) -> str:
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


def _state_bytes(layout: Layout) -> str:
    """What a trained parameter takes, gradients and padding aside."""
    kept = {name: size for name, size in layout.bytes_per_parameter.items() if size >= 0.005}
    states = ", ".join(f"{name} {size:.2f}".rstrip("0").rstrip(".") for name, size in kept.items())
    total = sum(layout.bytes_per_parameter.values())
    return f"State takes {total:.2f} bytes a parameter: {states}."


def _shared(ranks: Ranks) -> str:
    what = {1: "optimizer states", 2: "optimizer states and gradients", 3: "weights, gradients and optimizer states"}
    experts = f"; experts over {ranks.expert_parallel}" if ranks.expert_parallel > 1 else ""
    steps = "; gathers go once between nodes, then inside each" if ranks.two_step else ""
    tensors = f"; tensors over {ranks.tensor_parallel}" if ranks.tensor_parallel > 1 else ""
    said = f"share out {what[ranks.stage]} (ZeRO stage {ranks.stage})"
    return f"{ranks.data_parallel} ranks {said}{experts}{tensors}{steps}."


def _paged(layout: Layout, asked: int | None) -> Layout:
    """The layout with the page size asked for, or the largest one whose padding is small."""
    if asked is not None:
        return replace(layout, page_bytes=asked)
    page = PAGE_BYTES
    states = [state.name for state in layout.states]
    sliced = layout.ranks is not None and layout.ranks.data_parallel > 1
    if sliced or layout.gradient is not None:  # else gradients are as large as weights, and need not be looked at
        states.append(GRAD)
    exact = sum(layout.elements(unit, state) * layout.itemsize(state) for unit in layout.units for state in states)
    while page > _MIN_PAGE_BYTES:
        paged = replace(layout, page_bytes=page)
        if sum(map(paged.total_pages, states)) * page <= exact * (1 + _MAX_WASTE):
            return paged
        page //= 2
    return replace(layout, page_bytes=page)


def _next_limit(units: tuple[UnitSpec, ...], limit: int, itemsize: int) -> int | None:
    """A limit that splits the largest unit that can be split, or None when each is a single parameter's."""
    splittable = [u.numel * itemsize for u in units if len(u.slots) > 1 and u.numel * itemsize > _MIN_PAGE_BYTES]
    if not splittable or limit <= _MIN_PAGE_BYTES:
        return None
    return min(limit // 2, max(splittable) - 1)
