"""Placement fits its budgets, gives every extent a home, and refuses by exactly what is missing."""

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, strategies as st

from pagoda.config.memory import Split
from pagoda.errors import BudgetError
from pagoda.plan.layout import GRAD, WEIGHT, Layout
from pagoda.plan.options import Options
from pagoda.plan.place import place
from pagoda.plan.placement import FETCH_RING, LEASES, RING, STAGING, VERSIONS, Placement
from pagoda.plan.planner import make_plan
from pagoda.plan.tiers import DEVICE, HOST, SSD, Budgets
from pagoda.plan.units import ModuleSpec, ParamSpec

from .strategies import LARGE, STATES, Draw, layouts, unit


@st.composite
def budgets_for(draw: Draw, layout: Layout) -> Budgets:
    """Budgets from nothing to more than enough, with and without a device of its own and an SSD."""
    total = sum(layout.total_pages(state) for state in (*(s.name for s in layout.states), GRAD))

    def some(least: int = 0) -> int:
        return draw(st.integers(least, 2 * total)) * layout.page_bytes + draw(st.sampled_from([0, 1, 4095]))

    device = some() if draw(st.booleans()) else None
    ssd = draw(st.sampled_from(["none", "some", "large"]))
    return Budgets(some(), device, {"none": None, "some": some(), "large": LARGE}[ssd])


def names(layout: Layout) -> list[str]:
    return [*(state.name for state in layout.states), GRAD]


def in_ram(layout: Layout, placement: Placement, state: str) -> list[bool]:
    return [placement.home(unit.index, state) == HOST for unit in layout.units]


UNDER_BACKWARD, AFTER_BACKWARD = Options(gradient_accumulation_steps=1, split=Split()), Options(split=Split())
"""Options with which units are updated as their gradients arrive, and once all have. No unit lives on the device."""

cases = layouts().flatmap(
    lambda layout: st.tuples(st.just(layout), budgets_for(layout), st.sampled_from([AFTER_BACKWARD, UNDER_BACKWARD]))
)


def placed(case: tuple[Layout, Budgets, Options]) -> Placement:
    try:
        return place(*case)
    except BudgetError:
        assume(False)
        raise


def refusal(layout: Layout, budgets: Budgets, options: Options) -> BudgetError | None:
    try:
        place(layout, budgets, options)
    except BudgetError as error:
        return error
    return None


@given(cases)
def test_every_extent_has_a_home_and_its_pages_are_in_a_ledger_that_never_passes_the_budget(
    case: tuple[Layout, Budgets, Options],
) -> None:
    layout, budgets, options = case
    placement = placed(case)
    for tier, budget in ((HOST, budgets.host), (DEVICE, budgets.device), (SSD, budgets.ssd)):
        assert sum(placement.lines.get(tier, {}).values()) * layout.page_bytes <= (budget or 0)
        assert all(pages >= 0 for pages in placement.lines.get(tier, {}).values())
    for state in names(layout):
        homes = {unit.index: placement.home(unit.index, state) for unit in layout.units}
        assert set(homes.values()) <= ({HOST} if budgets.ssd is None else {HOST, SSD})
        if state == GRAD and options.update_during_backward and budgets.ssd is None and placement.pages(HOST, STAGING):
            assert placement.pages(HOST, GRAD) == 0, "a few buffers serve all units in turn"
            continue
        for tier in (HOST, SSD):
            pages = sum(layout.pages(unit, state) for unit in layout.units if homes[unit.index] == tier)
            assert placement.pages(tier, state) == pages


@given(cases)
def test_what_leaves_ram_has_the_buffers_it_moves_through(case: tuple[Layout, Budgets, Options]) -> None:
    layout, budgets, _ = case
    placement = placed(case)
    weights_out = not all(in_ram(layout, placement, WEIGHT))
    moments_out = not all(all(in_ram(layout, placement, state.name)) for state in layout.moments)
    if weights_out or moments_out:
        streamed = [state.name for state in layout.moments] + [WEIGHT] * weights_out
        assert placement.pages(HOST, RING) >= sum(layout.block_pages(state) for state in streamed)
    together = sum(sorted((layout.pages(unit, WEIGHT) for unit in layout.units), reverse=True)[:2])
    if budgets.device is not None:
        assert placement.pages(DEVICE, LEASES) >= together
        assert not weights_out or placement.pages(HOST, FETCH_RING) >= layout.fetch_piece_pages
    elif weights_out:
        assert placement.pages(HOST, LEASES) >= together
    if not all(in_ram(layout, placement, GRAD)):
        assert placement.pages(HOST, STAGING) >= max(layout.pages(unit, GRAD) for unit in layout.units)


@given(cases)
def test_ram_goes_to_weights_then_gradients_then_moments_of_the_first_units_of_forward(
    case: tuple[Layout, Budgets, Options],
) -> None:
    layout, budgets, options = case
    placement = placed(case)
    moments = tuple(state.name for state in layout.moments)
    for states in ((WEIGHT,), (GRAD,), moments):
        kept, passed = 0, []
        for of, is_in in zip(layout.units, in_ram(layout, placement, states[0]), strict=True):
            pages = sum(layout.pages(of, state) for state in states)
            kept += pages * is_in
            passed += [kept + pages] if pages and not is_in else []
        assert all(with_it > kept for with_it in passed), "a unit is passed over only where too little is left for it"

    def homed(*states: str) -> int:
        return sum(placement.pages(HOST, state) for state in states)

    def first_out(*states: str) -> int | None:
        """Pages of the first unit whose states are on SSD."""
        out = (u for u in layout.units if placement.home(u.index, states[0]) == SSD)
        return next((sum(layout.pages(unit, state) for state in states) for unit in out), None)

    host = budgets.host // layout.page_bytes
    unused = host - sum(placement.lines[HOST].values())
    weight, gradient, moment = first_out(WEIGHT), first_out(GRAD), first_out(*moments)
    widest_grad = max(layout.pages(unit, GRAD) for unit in layout.units)
    # More staging than the least there can be is room that gradients got.
    spare_staging = max(0, placement.pages(HOST, STAGING) - min(layout.total_pages(GRAD), 2 * widest_grad))
    if weight is not None:
        assert homed(GRAD, *moments) + spare_staging + unused < weight
    if gradient is not None and moment is not None and not options.update_during_backward:
        assert homed(*moments) + unused < gradient
    if moment is not None:
        assert unused < moment


@example(
    (Layout((unit(0, 19_000), unit(1, 19_000)), STATES["bf16"], 4096), Budgets(host=4096, ssd=LARGE), AFTER_BACKWARD)
)
@given(cases)
def test_a_refusal_names_the_tier_and_the_least_budget_that_is_taken(
    case: tuple[Layout, Budgets, Options],
) -> None:
    layout, budgets, options = case
    while (error := refusal(layout, budgets, options)) is not None:
        tier, needed = error.tier, error.needed_bytes
        assert tier in (HOST, DEVICE, SSD)
        assert needed > getattr(budgets, tier)
        assert f"{tier} needs at least" in str(error)
        assert f"memory.{tier}" in str(error)
        one_page_less = refusal(layout, replace(budgets, **{tier: needed - layout.page_bytes}), options)
        assert (one_page_less.tier, one_page_less.needed_bytes) == (tier, needed)
        budgets = replace(budgets, **{tier: needed})


@given(cases)
def test_second_versions_of_states_take_what_is_left_and_move_none(case: tuple[Layout, Budgets, Options]) -> None:
    layout, budgets, _ = case
    plain = placed((layout, budgets, AFTER_BACKWARD))
    undoing = place(layout, budgets, replace(UNDER_BACKWARD, clipping=True))
    assert undoing.homes == plain.homes
    for tier, budget in ((HOST, budgets.host), (SSD, budgets.ssd)):
        assert sum(undoing.lines.get(tier, {}).values()) * layout.page_bytes <= (budget or 0)
    kept = {HOST: 0, SSD: 0}
    for held in (layout.units[index] for index in undoing.speculated):
        for state in layout.states:
            kept[undoing.home(held.index, state.name)] += layout.pages(held, state.name)
    assert kept[HOST] <= undoing.pages(HOST, VERSIONS)
    assert kept[SSD] == undoing.pages(SSD, VERSIONS) - undoing.spare_on_ssd
    on_ssd = [(layout.units[u], s) for (u, s), home in undoing.homes.items() if home == SSD and s != GRAD]
    assert undoing.changing_on_ssd == sum(layout.pages(*each) - layout.frozen_pages(*each) for each in on_ssd)
    for tier in (HOST, SSD):
        assert undoing.pages(tier, VERSIONS) <= kept[tier] + plain.pages(tier, VERSIONS)
    everything = sum(layout.pages(unit, state.name) for unit in layout.units for state in layout.states)
    if budgets.host // layout.page_bytes > 3 * everything:
        mostly_trained = {unit.index for unit in layout.units if 2 * unit.trainable_numel >= unit.numel}
        assert undoing.speculated == (set() if budgets.device is None else mostly_trained)


def test_frozen_weights_on_ssd_need_no_spare_pages() -> None:
    """They never change, so a checkpoint and the run have them in common."""
    layout = Layout((unit(0, 5000, 300), *(unit(index, 0, 20_000) for index in range(1, 99))), STATES["bf16"], 4096)
    placement = place(layout, Budgets(116 * layout.page_bytes, ssd=LARGE), Options())  # the least
    assert placement.home(8, WEIGHT) == SSD
    trained = layout.units[0]
    changing = sum(layout.pages(trained, s.name) for s in layout.states if placement.home(0, s.name) == SSD)
    frozen = layout.frozen_pages(trained, WEIGHT) * (placement.home(0, WEIGHT) == SSD)
    assert placement.pages(SSD, VERSIONS) == changing - frozen > 0
    assert placement.changing_on_ssd == placement.pages(SSD, VERSIONS)


def test_activations_that_leave_a_device_get_ram_before_versions_for_a_checkpoint() -> None:
    """Each step moves activations, and few steps meet a checkpoint."""
    layout = Layout(tuple(unit(index, 50_000) for index in range(4)), STATES["bf16"], 4096)
    lines = {}
    for activations in ("keep", "offload"):
        options = Options(activations=activations)
        lines[activations] = place(layout, Budgets(LARGE, device=LARGE, ssd=LARGE), options).pages(HOST, VERSIONS)
    assert lines["offload"] == 0 < lines["keep"]


@pytest.mark.parametrize(("precision", "states", "gradient"), [("bf16", 2 + 2 + 4 + 4, 2), ("fp32", 4 + 4 + 4, 4)])
def test_an_update_moves_every_state_and_reads_the_gradient(precision: str, states: int, gradient: int) -> None:
    root = ModuleSpec("", (ParamSpec("weight", (64, 64)), ParamSpec("frozen", (64, 64), trainable=False)))
    layout = make_plan(root, STATES[precision], Budgets(1 << 30), Options(4096)).layout
    assert layout.bytes_per_update(layout.units[0]) == 2 * states + gradient
