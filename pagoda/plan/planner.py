"""The planner: makes an immutable plan from a module tree, an optimizer's states and budgets."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from pagoda.errors import BudgetError, ConfigError
from pagoda.memory.page import PAGE_BYTES
from pagoda.memory.sizes import format_bytes
from pagoda.optim.rule import StateSpec
from pagoda.plan.activations import NO_BLOCKS, ActivationPlan, offload_room, plan_activations
from pagoda.plan.buffers import BLOCK_ELEMENTS, GRADIENTS_IN_FLIGHT_BYTES
from pagoda.plan.collective import reduce_buffers
from pagoda.plan.device_updates import why_not_on_device
from pagoda.plan.exchanges import ROWS, Exchange
from pagoda.plan.lanes import LARGE_TRANSFER_BYTES
from pagoda.plan.layout import GRAD, WEIGHT, WEIGHT_BACK, Layout
from pagoda.plan.lookups import largest_lookups, lookups_asked
from pagoda.plan.options import DEFAULT_SPLIT, Options
from pagoda.plan.place import place
from pagoda.plan.placement import ACTIVATIONS, LEASES, MEANING, STAGING, Placement
from pagoda.plan.ranks import ALONE, Ranks
from pagoda.plan.reasons import MAX_WASTE, reasons_for
from pagoda.plan.tiers import BUDGETED, DEVICE, HOST, RANKS, SSD, Budgets
from pagoda.plan.trace import Trace, assumed_trace
from pagoda.plan.units import ModuleSpec, UnitSpec, discover, first_limit, forward_uses, is_within

_MIN_PAGE_BYTES = 4096
_BUFFERS = (
    *((BLOCK_ELEMENTS // part, 2) for part in (1, 2, 4)),
    *((BLOCK_ELEMENTS // part, 1) for part in (1, 2, 4, 8)),
)
"""Combinations to try, in this order: elements of a streamed block, and gradients in the staging region. The smallest
blocks come last: each transfer takes a core for about 0.2 ms, whatever its size."""


@dataclass(frozen=True)
class Plan:
    """Where each extent lives, and in which order a step uses units. It never changes."""

    layout: Layout
    budgets: Budgets
    placement: Placement
    options: Options
    trace: Trace
    activations: ActivationPlan
    """The policies for activations, once their sizes are known from a step or an estimate."""
    exchanges: tuple[Exchange, ...]
    """What compute exchanges with other ranks, and with the CPU."""
    unit_limit: int
    """The limit in bytes with which units were made."""
    notes: tuple[str, ...] = ()
    """Sentences that follow those of `reasons_for`."""

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Sentences that explain the choices."""
        return (*reasons_for(self), *self.notes)

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.layout.units

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def parameters(self) -> int:
        """Parameters of the model. Tied ones count once."""
        return sum(slot.param.numel for unit in self.units for slot in unit.slots)

    @cached_property
    def bytes(self) -> Mapping[str, Mapping[str, int]]:
        """tier -> line -> bytes at the peak, in whole pages, in the order in which tables show them."""
        order = (*(state.name for state in self.layout.states), WEIGHT_BACK, GRAD, *MEANING)
        account: dict[str, dict[str, int]] = {
            tier: {line: pages[line] * self.page_bytes for line in order if line in pages}
            for tier in BUDGETED
            if (pages := self.placement.lines.get(tier))
        }
        for tier, nbytes in ((HOST, self.activations.peak.host), (SSD, self.activations.peak.ssd)):
            if nbytes:
                lines = account.setdefault(tier, {})
                lines[ACTIVATIONS] = lines.get(ACTIVATIONS, 0) + nbytes
        return account

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        """tier -> bytes: the sum of its lines."""
        return {tier: sum(lines.values()) for tier, lines in self.bytes.items()}

    def bytes_in_use(self, frames: float, pages: float) -> dict[str, int]:
        """tier -> bytes while leases hold `frames` and gradient buffers `pages`, which come and go. Other lines are
        constant."""
        used = {
            tier: sum(nbytes for line, nbytes in lines.items() if line not in (LEASES, STAGING))
            for tier, lines in self.bytes.items()
        }
        for tier, count in ((self.lease_tier, frames), (HOST, pages)):
            if tier is not None:
                used[tier] = used.get(tier, 0) + round(count * self.page_bytes)
        return used

    @property
    def ranks(self) -> Ranks:
        return self.layout.ranks

    @property
    def lease_tier(self) -> str | None:
        """The tier of the leases' frames: the device if it has memory of its own, otherwise RAM. None if every weight
        is used in its home."""
        if self.budgets.device is not None:
            return DEVICE
        return HOST if self.placement.pages(HOST, LEASES) else None

    @property
    def gradients_in_flight_bytes(self) -> int:
        """Most bytes of gradients on their way to their extents at once.

        A larger single gradient from a separate device need not be waited for, because the estimate of activations
        includes two of the largest. With several ranks, gradients have buffers.
        """
        if whole_pages := reduce_buffers(self.layout).whole_pages:
            return whole_pages * self.page_bytes
        if self.budgets.device is None:
            return GRADIENTS_IN_FLIGHT_BYTES
        leaving = (unit for unit in self.units if not unit.on_host)
        trainable = ((unit, slot.param) for unit in leaving for slot in unit.slots if slot.param.trainable)
        largest = max((param.numel * self.layout.offloaded_itemsize(unit) for unit, param in trainable), default=0)
        return max(GRADIENTS_IN_FLIGHT_BYTES, largest)

    def units_holding(self, tier: str, states: Collection[str]) -> frozenset[int]:
        """Units of which the tier holds pages of some of the states."""
        there = self.placement.units_with
        return frozenset(
            unit for state in states for unit in there(tier, [state]) if self.layout.pages(self.units[unit], state)
        )

    @property
    def transfer_bytes(self) -> int:
        """Mean bytes that updates read from or write to SSD at a time. The largest size if no update does."""
        layout = self.layout
        nbytes = transfers = 0
        for unit in self.units:
            elements = layout.updated_elements(unit)
            for state in layout.states_of(unit):
                if elements and self.placement.home(unit.index, state.name) == SSD:
                    nbytes += state.nbytes(elements)
                    transfers += -(-elements // layout.block_elements)
        return nbytes // transfers if transfers else LARGE_TRANSFER_BYTES

    def leased_pages(self) -> dict[int, int]:
        """unit -> frames of its lease, for units whose weights are not used in their home."""
        everywhere = self.budgets.device is not None or self.ranks.shards_weights
        return {
            unit.index: self.layout.lease_of(unit)
            for unit in self.units
            if (everywhere or self.placement.home(unit.index, WEIGHT) == SSD)
            and not unit.on_host
            and (self.placement.home(unit.index, WEIGHT) != DEVICE or self.layout.is_sliced(unit, WEIGHT))
        }

    def source(self, unit: int) -> str:
        """Where the weights of a unit come from: their home, or RANKS if each rank has a slice of them."""
        return RANKS if self.layout.is_sliced(self.units[unit], WEIGHT) else self.placement.home(unit, WEIGHT)

    @property
    def saved_states(self) -> tuple[StateSpec, ...]:
        """What a checkpoint may hold of most units: their states, and as WEIGHT_BACK the weights that steps read while
        these lag."""
        late = [replace(self.layout.weight, name=WEIGHT_BACK)] if self.options.asynchronous else []
        return (*self.layout.states, *late)

    @property
    def spare_runs(self) -> dict[str, tuple[int, ...]]:
        """Tier in memory -> the pages of each spare run for versions: of every state of the units that are updated
        speculatively, or of the weights if updates are asynchronous."""
        spares: dict[str, list[int]] = {}
        for unit in self.units:
            states = self.layout.states_of(unit) if unit.index in self.placement.speculated else ()
            for state in (self.layout.weight,) if self.options.asynchronous else states:
                tier = self.placement.homes.get((unit.index, state.name), HOST)
                if tier != SSD and (pages := self.layout.pages(unit, state.name)):
                    spares.setdefault(tier, []).append(pages)
        return {tier: tuple(runs) for tier, runs in spares.items()}

    def update_block(self, unit: UnitSpec, threads: int) -> int:
        """Elements of a block of a unit's update by an element-wise rule. `threads` update units in RAM."""
        layout, placement = self.layout, self.placement
        if unit.index in placement.passing or placement.streamed(unit.index, layout.states_of(unit)):
            return layout.block_elements
        return layout.block_at_home(unit, unit.index in placement.on_device, threads)

    @property
    def lease_slab(self) -> int:
        """Frames of a slab of the leases: the widest lease, or all frames if all leases fit at once."""
        frames = self.placement.pages(self.lease_tier or HOST, LEASES)
        pages = self.leased_pages().values()
        return frames if sum(pages) <= frames else max(pages)

    def retraced(self, trace: Trace) -> "Plan":
        """The same placement with another trace."""
        return replace(self, trace=trace)

    def placed_in(self, budgets: Budgets) -> "Plan":
        """The same units in other budgets. Raises BudgetError if they do not fit."""
        layout, placement = _fit(self.layout.with_block_limit(BLOCK_ELEMENTS), budgets, self.options)
        return replace(self, layout=layout, budgets=budgets, placement=placement)


def make_plan(
    root: ModuleSpec,
    states: tuple[StateSpec, ...],
    budgets: Budgets,
    options: Options,
    ranks: Ranks = ALONE,
    exchanges: Sequence[Exchange] = (),
    rank: int | None = None,
    saved: ActivationPlan = NO_BLOCKS,
) -> Plan:
    """Choose units, page size and placement for an assumed step.

    `saved`: estimated sizes of activations, with policies. The plan then includes the bytes that these offload, and
    their moves.

    `ranks`: the plan and its budgets are those of one rank. `exchanges`: as in `Plan`. Rows of embeddings that the
    device looks up are left out. If ranks divide experts, `root` has the experts of one rank. If ranks hold different
    numbers of elements (`Slices`), the plan is that of `rank`, or of the rank that holds most. Units and pages suit the
    rank that holds most, so they are the same on all ranks.

    Raises BudgetError with tier, shortfall and setting if nothing fits, and ConfigError for a split whose share of
    updates or homes on the device is impossible.
    """
    passes = options.gradient_accumulation_steps or 1
    if ranks.shares_experts and any(root.experts()) and options.update_during_backward:
        # A rank knows only at `step()` which experts others use.
        options = replace(options, gradient_accumulation_steps=None)
    itemsize = states[0].dtype.itemsize
    on_host = lookups_asked(root, itemsize, options, budgets, ranks)
    try:
        limit, layout, placement = _units_that_fit(root.with_on_host(on_host), states, budgets, options, ranks)
    except BudgetError as refusal:
        free = options.embedding_limit is None and refusal.tier == DEVICE
        on_host = largest_lookups(root, ranks) if free else frozenset()
        if not on_host:
            raise
        try:
            limit, layout, placement = _units_that_fit(root.with_on_host(on_host), states, budgets, options, ranks)
        except BudgetError:
            raise refusal from None
    if rank is not None and layout.slices.differ:
        layout, placement = _fit(replace(layout, rank=rank), budgets, options)
    uses = forward_uses(root, layout.units)
    trace = assumed_trace([use.unit for use in uses], passes)
    activations = plan_activations(root, uses, saved, offload_room(layout, placement, budgets))
    exchanges = tuple(exchange for exchange in exchanges if exchange.kind != ROWS or exchange.module in on_host)
    return Plan(layout, budgets, placement, options, trace, activations, exchanges, limit)


def _units_that_fit(
    root: ModuleSpec, states: tuple[StateSpec, ...], budgets: Budgets, options: Options, ranks: Ranks
) -> tuple[int, Layout, Placement]:
    """A placement with the largest units that fit, and the limit in bytes with which they were made."""
    itemsize = states[0].dtype.itemsize
    limit = options.unit_limit or first_limit(root.nbytes(itemsize))
    expert_modules = frozenset(root.experts())
    refusals: list[BudgetError] = []
    while True:
        units = discover(root, limit, itemsize)
        experts = frozenset(unit.index for unit in units if is_within(unit.module, expert_modules))
        draft = Layout(units, states, PAGE_BYTES, ranks=ranks, expert_units=experts, gradient=options.gradients)
        paged = _paged(replace(draft, rank=draft.slices.fullest_rank), options.page_bytes)
        try:
            return limit, *_fit(paged, budgets, options)
        except BudgetError as refusal:
            refusals.append(refusal)
        smaller = _next_limit(draft, limit)
        if options.unit_limit is not None or smaller is None:
            raise _with_advice(_least(refusals), draft, budgets)
        limit = smaller


def _fit(layout: Layout, budgets: Budgets, options: Options) -> tuple[Layout, Placement]:
    """A placement, with smaller streaming buffers if the budget is tight."""
    refusals: list[BudgetError] = []
    split = options.split or DEFAULT_SPLIT
    refused = why_not_on_device(layout, options, budgets.device)
    for name in ("device_update_share", "device_home_share"):
        share = getattr(split, name)
        if refused is not None and share:
            raise ConfigError(f"split.{name} is {share}, but {refused}. memory.split=None chooses it.")
    if refused is not None:
        split = replace(split, device_home_share=0.0)
    splits = [split]
    # If RAM and SSD cannot hold everything, the device may.
    if options.split is None and refused is None:
        splits.append(replace(split, device_home_share=1.0))
    for split, (block_limit, staging_buffers) in product(splits, _BUFFERS):
        candidate = layout.with_block_limit(block_limit)
        try:
            return candidate, place(candidate, budgets, replace(options, split=split), staging_buffers)
        except BudgetError as refusal:
            refusals.append(refusal)
    raise _least(refusals)


def _least(refusals: list[BudgetError]) -> BudgetError:
    """Of the refusals that found the most tiers sufficient, the one that needs the least."""
    furthest = max(BUDGETED.index(r.tier or DEVICE) for r in refusals)
    return min((r for r in refusals if r.tier == BUDGETED[furthest]), key=lambda r: r.needed_bytes or 0)


def _with_advice(refusal: BudgetError, layout: Layout, budgets: Budgets) -> BudgetError:
    """The refusal, with advice if a single parameter is too large and may be cut: one that its optimizer does not take
    whole, of a model without adapters."""
    largest = max((unit for unit in layout.units if not unit.on_host), key=layout.weight_bytes)
    nbytes = layout.weight_bytes(largest)
    has = budgets.device if refusal.tier == DEVICE else budgets.host if refusal.tier == HOST else None
    stays_whole = layout.weight.whole is not None or any(unit.trainable_numel < unit.numel for unit in layout.units)
    if stays_whole or len(largest.slots) > 2 or has is None or 2 * nbytes < has:
        return refusal
    return BudgetError(
        f"{refusal} The layer {largest.name!r} alone takes {format_bytes(nbytes)}: with pagoda.Tiles(tile_limit=...), "
        "linear layers and embeddings are fetched in tiles.",
        tier=refusal.tier,
        needed_bytes=refusal.needed_bytes,
    )


def _paged(layout: Layout, asked: int | None) -> Layout:
    """The layout with the requested page size, or with the largest one that wastes little."""
    if asked is not None:
        return layout.with_page_bytes(asked)
    page = PAGE_BYTES
    states = [state.name for state in layout.states]
    # Otherwise gradients are as large as weights, and need not be looked at.
    if layout.ranks.data_parallel > 1 or layout.gradient is not None:
        states.append(GRAD)
    least = layout.with_page_bytes(_MIN_PAGE_BYTES)  # slices may be whole pages
    exact = sum(map(least.total_bytes, states))
    while page > _MIN_PAGE_BYTES:
        paged = layout.with_page_bytes(page)
        if sum(map(paged.total_pages, states)) * page <= exact * (1 + MAX_WASTE):
            return paged
        page //= 2
    return layout.with_page_bytes(page)


def _next_limit(layout: Layout, limit: int) -> int | None:
    """A limit that splits the largest unit that can be split. None if every unit is a single parameter."""
    sizes = (layout.weight_bytes(unit) for unit in layout.units if len(unit.slots) > 1)
    splittable = [nbytes for nbytes in sizes if nbytes > _MIN_PAGE_BYTES]
    if not splittable or limit <= _MIN_PAGE_BYTES:
        return None
    return min(limit // 2, max(splittable) - 1)
