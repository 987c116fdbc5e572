"""The planner chooses units, pages and placement that fit, says why, and knows what operations move."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pagoda.errors import BudgetError
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES
from pagoda.plan.buffers import BLOCK_ELEMENTS
from pagoda.plan.lanes import update_threads
from pagoda.plan.layout import GRAD
from pagoda.plan.options import Options, Split
from pagoda.plan.placement import LEASES, STAGING
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.tiers import DEVICE, HOST, SSD, Budgets
from pagoda.plan.traffic import bytes_written_to_ssd, traffic_of
from pagoda.plan.units import ModuleSpec, ParamSpec

from .strategies import LARGE, STATES, large_trees, plans


def block(name: str, width: int) -> ModuleSpec:
    """Two matrices of `width` * `width`, each of a module of its own."""
    return ModuleSpec(
        name,
        (),
        tuple(ModuleSpec(f"{name}.{part}", (ParamSpec(f"{name}.{part}.weight", (width, width)),)) for part in "ab"),
    )


def tower(layers: int, width: int) -> ModuleSpec:
    return ModuleSpec("", (), tuple(block(f"layers.{index}", width) for index in range(layers)))


any_plans = plans(separate=False) | plans(separate=True)


# --- choices ----------------------------------------------------------------------------------------------


def test_a_second_gradient_buffer_goes_before_blocks_get_smaller() -> None:
    root, states, options = tower(4, 2048), STATES["bf16"], Options(page_bytes=1 << 16)
    with pytest.raises(BudgetError) as refused:
        make_plan(root, states, Budgets(1, None, LARGE), options)
    least = refused.value.needed_bytes
    tight = make_plan(root, states, Budgets(least, None, LARGE), options)
    assert tight.layout.block_elements == BLOCK_ELEMENTS // 8
    gradient = max(tight.layout.pages(unit, GRAD) for unit in tight.units) * tight.page_bytes
    roomier = make_plan(root, states, Budgets(least + gradient - 1, None, LARGE), options)
    assert roomier.placement.pages(HOST, STAGING) * roomier.page_bytes == gradient
    assert roomier.layout.block_elements > BLOCK_ELEMENTS // 8


def test_blocks_of_updates_in_ram_are_large_unless_threads_would_wait_or_they_pass_a_ring() -> None:
    root, states = tower(2, 8192), STATES["bf16"]
    in_ram = make_plan(root, states, Budgets(LARGE), Options())
    (elements,) = {unit.trainable_numel for unit in in_ram.units}
    for threads in (2, 14):
        block = in_ram.update_block(in_ram.units[0], threads)
        assert 2 * BLOCK_ELEMENTS <= block <= min(4 * BLOCK_ELEMENTS, elements // (2 * threads))
    small = make_plan(tower(2, 256), states, Budgets(LARGE), Options())
    assert small.update_block(small.units[0], 14) == small.layout.block_elements
    device = Budgets(LARGE, LARGE)
    tight = replace(device, host=in_ram.peak_bytes[HOST] // 3, ssd=LARGE)
    streaming = make_plan(root, states, tight, Options(split=Split()))
    passing = make_plan(root, states, device, Options(split=Split(device_update_share=1.0)))
    for plan in (streaming, passing):
        assert {plan.update_block(unit, 14) for unit in plan.units} == {plan.layout.block_elements}
    at_home = make_plan(root, states, device, Options(split=Split(device_home_share=1.0)))
    assert at_home.update_block(at_home.units[0], 14) >= elements


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (7, 7), (8, 6), (16, 14), (64, 62)])
def test_updates_leave_two_of_many_cores_to_python(cores: int, threads: int) -> None:
    assert update_threads(cores) == threads


@given(st.integers(1, 6), st.integers(16, 900))
def test_pages_are_the_largest_that_waste_little(layers: int, width: int) -> None:
    states = STATES["bf16"]
    plan = make_plan(tower(layers, width), states, Budgets(LARGE), Options())
    exact = sum(unit.numel for unit in plan.units) * sum(state.dtype.itemsize for state in states)

    def waste(page_bytes: int) -> float:
        layout = replace(plan.layout, page_bytes=page_bytes)
        return sum(layout.total_pages(state.name) for state in states) * page_bytes / exact - 1

    assert plan.page_bytes == PAGE_ALIGN or waste(plan.page_bytes) <= 0.02
    assert plan.page_bytes == PAGE_BYTES or waste(2 * plan.page_bytes) > 0.02
    assert PAGE_ALIGN <= plan.page_bytes <= PAGE_BYTES


def test_units_shrink_where_the_budget_is_tight_unless_their_limit_was_asked_for() -> None:
    root, states = tower(8, 512), STATES["bf16"]
    roomy = make_plan(root, states, Budgets(LARGE, ssd=LARGE), Options())
    widest = max(unit.numel for unit in roomy.units) * 2
    with pytest.raises(BudgetError) as refused:
        make_plan(root, states, Budgets(0, ssd=LARGE), Options(unit_limit=widest))
    needed = refused.value.needed_bytes
    tight = Budgets(needed - 1, ssd=LARGE)
    with pytest.raises(BudgetError, match="unit_limit"):
        make_plan(root, states, tight, Options(unit_limit=widest))
    plan = make_plan(root, states, tight, Options())
    assert max(unit.numel for unit in plan.units) * 2 < widest
    assert plan.peak_bytes[HOST] <= needed - 1


def test_a_slab_of_leases_holds_the_widest_unit_unless_all_fit_at_once() -> None:
    root = ModuleSpec("", (), (tower(16, 64), ModuleSpec("wide", (ParamSpec("wide.weight", (64, 512)),))))
    for room, all_fit in ((LARGE, True), (40 * 4096, False)):
        plan = make_plan(root, STATES["bf16"], Budgets(LARGE, room), Options(page_bytes=4096, unit_limit=1))
        widest, frames = max(plan.leased_pages().values()), plan.placement.pages(DEVICE, LEASES)
        assert (sum(plan.leased_pages().values()) <= frames) == all_fit
        assert plan.lease_slab == (frames if all_fit else widest)


def refusal(root: ModuleSpec, budgets: Budgets, options: Options) -> BudgetError | None:
    try:
        make_plan(root, STATES["bf16"], budgets, options)
    except BudgetError as error:
        return error
    return None


@given(large_trees, st.sampled_from([None, 1, 40_000]), st.none() | st.just(0), st.sampled_from([None, 0, LARGE]))
def test_what_a_refusal_asks_for_is_enough_whatever_units_it_takes(
    root: ModuleSpec, unit_limit: int | None, device: int | None, ssd: int | None
) -> None:
    options = Options(unit_limit=unit_limit)
    budgets = Budgets(0, device, ssd)
    asked_for: list[str] = []
    while (error := refusal(root, budgets, options)) is not None:
        asked_for.append(error.tier)
        budgets = replace(budgets, **{error.tier: error.needed_bytes})
    assert len(asked_for) == len(set(asked_for))
    if ssd != 0:  # less of one tier cannot be made up for by another
        for tier in asked_for:
            short = replace(budgets, **{tier: getattr(budgets, tier) - 1})
            error = refusal(root, short, options)
            assert (error.tier, error.needed_bytes) == (tier, getattr(budgets, tier))


@pytest.mark.parametrize(
    ("kept", "ssd", "reason"),
    [
        (0, LARGE, "SSD sets no room aside for the pages of a checkpoint"),
        (None, 2 << 20, "The 2.00 MiB of SSD that the run may use have no room for the pages of a checkpoint"),
        (None, LARGE, "SSD has room for the pages of 1 checkpoint"),
    ],
)
def test_the_reason_says_why_a_checkpoint_copies_state_on_ssd(kept: int | None, ssd: int, reason: str) -> None:
    root = tower(4, 128)
    least = refusal(root, Budgets(0, ssd=LARGE), Options(keep_checkpoints=0))
    assert least is not None
    plan = make_plan(root, STATES["bf16"], Budgets(least.needed_bytes, ssd=ssd), Options(keep_checkpoints=kept))
    assert any(said.startswith(reason) for said in plan.reasons)


# --- traffic --------------------------------------------------------------------------------------------


@given(any_plans)
def test_lines_are_all_that_is_held_only_what_lives_on_ssd_is_streamed_and_only_what_is_away_is_leased(
    plan: Plan,
) -> None:
    assert plan.peak_bytes == {tier: sum(lines.values()) for tier, lines in plan.bytes.items()}
    for tier, budget in (("device", plan.budgets.device), (HOST, plan.budgets.host), (SSD, plan.budgets.ssd)):
        assert plan.peak_bytes.get(tier, 0) <= (budget or 0)
    traffic, leased, written = traffic_of(plan), plan.leased_pages(), 0
    for unit in plan.units:
        on_ssd = sum(
            unit.trainable_numel * state.dtype.itemsize
            for state in plan.layout.states
            if plan.placement.home(unit.index, state.name) == SSD
        )
        assert traffic[unit.index].streamed == on_ssd
        written += on_ssd
        # Where updates run during backward, all but the last gradient of a step wait for others.
        passes = plan.options.gradient_accumulation_steps or 1
        waiting = passes - 1 if plan.options.update_during_backward else passes
        if unit.trainable_numel and plan.placement.home(unit.index, GRAD) == SSD:
            written += waiting * plan.layout.pages(unit, GRAD) * plan.page_bytes
        away = plan.budgets.device is not None or plan.placement.home(unit.index, "weight") == SSD
        assert (unit.index in leased) == (away and plan.placement.home(unit.index, "weight") != DEVICE)
    assert bytes_written_to_ssd(plan) == written
    assert (plan.lease_tier is not None) == bool(leased)
    assert {unit for unit, of_unit in enumerate(traffic) if of_unit.fetched} == set(leased)


@pytest.mark.parametrize(("device", "most"), [(None, 32 << 20), (LARGE, 40 << 20)])
def test_the_largest_gradient_leaves_a_device_of_its_own_without_a_wait(device: int | None, most: int) -> None:
    root = ModuleSpec("", (ParamSpec("w", (20 << 20,)), ParamSpec("b", (1024,)), ParamSpec("f", (30 << 20,), False)))
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, device), Options())
    assert plan.gradients_in_flight_bytes == most
