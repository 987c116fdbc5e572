"""Ranks share out the state as ZeRO does; what they gather and reduce is in the plan and in its simulated step."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from pagoda.config.memory import Split
from pagoda.errors import ConfigError
from pagoda.forecast.describe import module_spec
from pagoda.models.papers import PAPER_SHAPES
from pagoda.plan.buffers import BLOCK_ELEMENTS
from pagoda.plan.collective import MESSAGE_BYTES, reduce_buffers
from pagoda.plan.exchanges import of_heads, of_stage, of_tokens
from pagoda.plan.lanes import LaneName
from pagoda.plan.options import Options
from pagoda.plan.placement import COLLECTIVE_BUFFERS, LEASES, SERVING
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import ALONE, Ranks, ring_bytes
from pagoda.plan.tiers import DEVICE, HOST, Budgets
from pagoda.plan.trace import Phase, gradients_of
from pagoda.plan.traffic import exchanges_at, traffic_of
from pagoda.plan.units import ModuleSpec
from pagoda.simulate.hardware import Link
from pagoda.simulate.rates import Rates
from pagoda.simulate.simulation import Simulation, simulate

from .strategies import GPU, LARGE, STATES, drained, figure, large_trees, plans
from .test_planner import tower

GIB = 1 << 30
PER_NODE = 4

NODE = replace(
    GPU,
    gpus_per_node=PER_NODE,
    link=Link(figure(1e10), figure(1e10), figure(1.6e10)),
    intra_node_bytes_per_s=figure(1e11),
    inter_node_bytes_per_s=figure(1e10),
)


def shared(n: int, stage: int = 3, **settings: int) -> Ranks:
    return Ranks(n, PER_NODE, stage, **settings)


any_ranks = st.builds(shared, st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
of_ranks = any_ranks.flatmap(lambda ranks: plans(separate=True, ranks=ranks))


# --- what a rank holds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(0, 1), (1, 0), (6, 4), (4, 4, 0), (4, 4, 3, 3), (4, 4, 3, 0)])
def test_groups_that_do_not_come_out_even_are_refused(settings: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Ranks(*settings)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_a_rank_holds_what_zeros_formulas_say_with_fourteen_bytes(n: int, stage: int) -> None:
    root = tower(24, 512)
    params = sum(param.numel for param in root.walk())
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, LARGE), Options(split=Split()), shared(n, stage))
    divided = {1: 10, 2: 12, 3: 14}[stage]
    held = sum(nbytes for line, nbytes in plan.bytes[HOST].items() if line not in ("bounce", "checkpoint", "versions"))
    assert held == pytest.approx(params * (14 - divided + divided / n), rel=0.025)


@given(of_ranks)
def test_leases_are_whole_units_and_fit_the_device(plan: Plan) -> None:
    for unit in plan.units:
        used_at_home = plan.placement.home(unit.index, "weight") == DEVICE and not plan.layout.is_sliced(unit, "weight")
        assert used_at_home or plan.leased_pages()[unit.index] * plan.page_bytes >= 2 * unit.numel
    assert plan.peak_bytes[DEVICE] <= (plan.budgets.device or 0)
    least = min(plan.layout.lease_pages(ahead=1), sum(plan.leased_pages().values()))
    assert plan.placement.pages(DEVICE, LEASES) >= least
    assert (plan.placement.pages(DEVICE, COLLECTIVE_BUFFERS) > 0) == (reduce_buffers(plan.layout).pages > 0)


@given(large_trees, st.integers(1, 3))
def test_a_group_of_one_has_the_plan_of_a_rank_alone(root: ModuleSpec, stage: int) -> None:
    budgets, options = Budgets(LARGE, LARGE), Options()
    alone = make_plan(root, STATES["bf16"], budgets, options)
    one = make_plan(root, STATES["bf16"], budgets, options, shared(1, stage))
    assert traffic_of(one) == traffic_of(alone)
    assert one.bytes == alone.bytes


def trained(plan: Plan) -> frozenset[int]:
    return frozenset(unit.index for unit in plan.units if unit.trainable_numel)


# --- what a rank sends ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "volumes"), [(1, 3), (2, 2), (3, 3)])
def test_what_is_sent_is_zeros_volume(stage: int, volumes: int) -> None:
    """Stage 2 sends as much as plain data parallelism, stage 3 half more. Stage 1 keeps whole gradients, so they are
    all-reduced, which sends twice what a reduce-scatter does."""
    root = tower(16, 256)
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, 1 << 20), Options(page_bytes=4096), shared(8, stage))
    weights = 2 * sum(param.numel for param in root.walk())
    total = simulate(plan, NODE, [1e-3] * (len(plan.trace.accesses) - 1)).bytes_moved[LaneName.COLLECTIVE]
    # The units that end forward begin backward, and are gathered once.
    assert 0.85 * volumes <= total / ring_bytes(weights, 8) <= 1.02 * volumes


@given(of_ranks)
def test_a_step_takes_no_less_than_the_collectives_and_the_ledger_holds(plan: Plan) -> None:
    timeline = simulate(plan, NODE, [1e-6] * (len(plan.trace.accesses) - 1))
    made = Counter(gradient.unit for gradient in gradients_of(plan.trace, trained(plan)))
    traffic = traffic_of(plan)
    nbytes = sum(n * traffic[unit].reduced for unit, n in made.items())
    nbytes += sum(traffic[unit].gathered + traffic[unit].published for unit in made)
    seconds = Rates(NODE, plan.ranks).ring_seconds(nbytes, plan.ranks.data_parallel)
    assert timeline.step_s >= seconds * (1 - 1e-6)
    for tier, account in timeline.held_bytes.items():
        assert all(n <= plan.peak_bytes[tier] <= getattr(plan.budgets, tier) for _, n in account)


def test_a_plan_is_simulated_on_nodes_of_its_own_size_only() -> None:
    plan = make_plan(tower(2, 64), STATES["bf16"], Budgets(LARGE, LARGE), Options(), shared(8))
    with pytest.raises(ConfigError, match="4 ranks per node"):
        simulate(plan, NODE.with_gpus(2), [0.0] * (len(plan.trace.accesses) - 1))


@pytest.mark.parametrize("settings", [{}, {"replicas": 2}, {"tensor_parallel": 2}])
def test_communication_buffers_are_of_the_same_size_for_any_number_of_ranks(settings: dict[str, int]) -> None:
    """Beside three whole gradients of the widest unit, and leases."""
    for count in (2, 64, 4096):
        for stage in (1, 2, 3):
            plan = make_plan(
                tower(2, 1024),
                STATES["bf16"],
                Budgets(LARGE, LARGE, LARGE),
                Options(),
                shared(count, stage, **settings),
            )
            buffers = reduce_buffers(plan.layout)
            reducing = plan.placement.pages(DEVICE, COLLECTIVE_BUFFERS) - 3 * buffers.whole_pages
            assert 0 < reducing * plan.page_bytes < 4 * BLOCK_ELEMENTS + plan.page_bytes
            serving = plan.placement.pages(HOST, SERVING) * plan.page_bytes
            assert (serving > 0) == (stage == 3)
            assert serving <= MESSAGE_BYTES + plan.page_bytes


def test_a_step_of_several_passes_has_them_on_ranks_too() -> None:
    for ranks in (ALONE, shared(4)):
        plan = make_plan(
            tower(4, 64), STATES["bf16"], Budgets(LARGE, LARGE), Options(gradient_accumulation_steps=3), ranks
        )
        assert [access.phase for access in plan.trace.accesses].count(Phase.FORWARD) == 3 * len(plan.units)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_gather_the_sums_of_every_copy(stage: int) -> None:
    """Each of two nodes has a copy: gathers stay inside it, and fp32 sums of a rank's slice go to the other."""
    ranks = shared(8, stage, replicas=2)
    plan = make_plan(tower(4, 256), STATES["bf16"], Budgets(LARGE, LARGE), Options(page_bytes=4096), ranks)
    sums = 0
    for unit, traffic in zip(plan.units, traffic_of(plan), strict=True):
        assert traffic.merged == 4 * plan.layout.updated_elements(unit)
        sums += traffic.merged
    timeline = simulate(plan, NODE, [1e-3] * (len(plan.trace.accesses) - 1))
    reduces = [span for span in timeline.spans if span.name.startswith("reduce")]
    moved = sum(traffic.reduced + traffic.merged for traffic in traffic_of(plan))
    assert sum(span.nbytes for span in reduces) == moved
    across = sums * PER_NODE / 1e10  # the four ranks of a node share its network
    inside = sum(traffic.reduced for traffic in traffic_of(plan)) / 1e11
    assert sum(span.end_s - span.start_s for span in reduces) == pytest.approx(across + inside, rel=1e-6)
    whole = make_plan(tower(4, 256), STATES["bf16"], Budgets(LARGE, LARGE), Options(page_bytes=4096), shared(8, stage))
    assert all(traffic.merged == 0 for traffic in traffic_of(whole))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_with_all_weights_on_ssd_reads_its_slice_to_send_it_and_writes_the_others(stage: int) -> None:
    """Against stage 3, which reads and writes a slice: each step writes all weights, and reads one slice more."""
    n, root = 4, tower(16, 256)
    weights = 2 * sum(param.numel for param in root.walk())
    budgets, options = Budgets(4 << 20, ssd=LARGE), Options(page_bytes=4096)
    plan, sliced = (make_plan(root, STATES["bf16"], budgets, options, shared(n, s)) for s in (stage, 3))
    on_ssd = plan.bytes["ssd"]["weight"]
    assert on_ssd > 0.25 * weights
    kept, sent = (sum(getattr(of, name) for of in traffic_of(plan)) for name in ("kept_on_ssd", "sent_from_ssd"))
    assert kept == pytest.approx(on_ssd * (n - 1) / n, rel=0.02)
    assert sent == pytest.approx(on_ssd / n, rel=0.02)
    assert not any(of.kept_on_ssd or of.sent_from_ssd for of in traffic_of(sliced))
    timeline = simulate(plan, NODE, [1e-3] * (len(plan.trace.accesses) - 1))
    moved = {
        lane: sum(span.nbytes for span in timeline.spans if (span.lane, span.name[:6]) == (lane, "share "))
        for lane in ("ssd_read", LaneName.COLLECTIVE, "ssd_write")
    }
    assert (moved["ssd_read"], moved["ssd_write"]) == (sent, kept)
    assert moved[LaneName.COLLECTIVE] == ring_bytes(weights, n)


def test_what_a_guess_has_updated_is_shared_once_it_is_there() -> None:
    options = Options(page_bytes=4096, clipping=True, gradient_accumulation_steps=1)
    plan = make_plan(tower(16, 256), STATES["bf16"], Budgets(4 << 20, ssd=LARGE), options, shared(4, 2))
    assert plan.placement.speculated
    rates = Rates(NODE, plan.ranks, plan.transfer_bytes)
    simulation = Simulation(plan, rates, [1e-4] * (len(plan.trace.accesses) - 1))
    simulation.step()
    simulation.step()
    spans = drained(simulation)
    read = {span.name[6:]: span.start_s for span in spans if span.lane == "ssd_read" and span.name[:6] == "share "}
    written = {span.name[6:]: span.end_s for span in spans if span.lane == "ssd_write" and span.name[:6] == "write "}
    assert read
    assert all(start >= written[unit] for unit, start in read.items())


@given(any_ranks, large_trees)
def test_no_page_of_weights_is_in_two_slices_where_every_rank_has_all(ranks: Ranks, root: ModuleSpec) -> None:
    plan = make_plan(root, STATES["bf16"], Budgets(LARGE, LARGE), Options(), ranks)
    for unit in plan.units if ranks.stage < 3 else ():
        ends = [plan.layout.slices.trained(unit, place).stop for place in range(plan.layout.group(unit))]
        assert ends[-1] == unit.trainable_numel
        assert all(2 * end % plan.page_bytes == 0 for end in ends if end < unit.trainable_numel)


# --- how long it takes ------------------------------------------------------------------------------------


def test_rings_and_exchanges_cross_each_network_once_and_ranks_of_a_node_share_it() -> None:
    inside, across = Rates(NODE, shared(4)), Rates(NODE, shared(16))
    assert inside.ring_seconds(ring_bytes(4 * GIB, 4), 4) == pytest.approx(3 * GIB / 1e11)
    assert across.ring_seconds(ring_bytes(16 * GIB, 16), 16) == pytest.approx(12 * GIB / 1e10)

    def seconds(sent: int, ranks: Ranks) -> float:
        (tokens,) = of_tokens({"experts": sent}, ranks)
        return Rates(NODE, ranks).exchange_seconds(tokens)

    leaves = 12 / 15
    assert seconds(15 * GIB, shared(16, expert_parallel=16)) == pytest.approx(15 * GIB * leaves * PER_NODE / 1e10)
    assert seconds(GIB, shared(4, expert_parallel=4)) == pytest.approx(GIB / 1e11)


def test_ranks_of_one_domain_send_as_within_a_node_and_share_the_adapters_of_all_its_nodes() -> None:
    def ring(ranks: int, joined: int) -> float:
        return Rates(NODE, shared(ranks, nodes_per_domain=joined)).ring_seconds(ring_bytes(16 * GIB, ranks), ranks)

    assert ring(16, joined=4) == pytest.approx(15 * GIB / 1e11)
    assert ring(16, joined=2) == pytest.approx(16 * GIB / 2 / 2e10)
    (tokens,) = of_tokens({"experts": GIB}, shared(16, expert_parallel=16, nodes_per_domain=4))
    assert tokens.over_network == 0


@pytest.mark.parametrize(
    ("inside", "oversubscription", "adapter_gib"),
    [
        (1e11, 4, 4 * 12),  # 9 GiB more inside take less than the adapters: 12 GiB of each of four ranks
        (2e9, 1, 4 * 12),  # the spine takes 4 * 9 at the rate of the adapters
        (2e9, 1.5, 1.5 * 4 * 9),
        (2e9, 2, 5 * (3 + 9)),  # faster than the spine: 3 GiB stay, and 9 change rails, at a fifth of that rate
    ],
)
def test_bytes_for_another_rail_go_through_the_node_or_over_the_spine(
    inside: float, oversubscription: float, adapter_gib: float
) -> None:
    node = replace(NODE, rails=4, oversubscription=oversubscription, intra_node_bytes_per_s=figure(inside))
    ranks = shared(16, expert_parallel=16, rails=4)
    (tokens,) = of_tokens({"experts": 15 * GIB}, ranks)
    assert (tokens.over_network, tokens.to_other_rails) == (12 * GIB, 9 * GIB)
    assert Rates(node, ranks).exchange_seconds(tokens) == pytest.approx(adapter_gib * GIB / 1e10)
    assert tokens.scaled(2).to_other_rails == 2 * tokens.to_other_rails
    (heads,) = of_heads(["layer"], 16 * GIB, shared(16, rails=2), 16)
    assert (heads.over_network, heads.to_other_rails) == (12 * GIB, 6 * GIB)


@pytest.mark.parametrize(("rails", "to_other_rails"), [(1, 0), (2, 0), (4, GIB)])
def test_stages_of_half_a_node_send_to_ranks_on_other_rails(rails: int, to_other_rails: int) -> None:
    before, after = of_stage(GIB, shared(2, pipeline_parallel=4, rails=rails), 2)
    assert (before.over_network, before.to_other_rails, before.senders_at_once) == (GIB, to_other_rails, 2)
    assert after.over_network == 0


def test_ranks_that_divide_sequences_send_each_other_equal_parts() -> None:
    (one,) = of_heads(["layer"], 16 * GIB, shared(16), 16)
    assert (one.sent, one.over_network, one.senders_at_once) == (15 * GIB, 12 * GIB, PER_NODE)
    (inside,) = of_heads(["layer"], 16 * GIB, shared(16), PER_NODE)
    assert (inside.sent, inside.over_network) == (16 * GIB * (PER_NODE - 1) // PER_NODE, 0)


# --- experts ----------------------------------------------------------------------------------------------

MOE = replace(PAPER_SHAPES["t5-moe-1.2t"], layers=2, decoder_layers=2, experts=16, hidden=256, ffn=1024, heads=4)


@settings(max_examples=10)
@given(st.sampled_from([1, 2, 4, 8]))
def test_experts_are_divided_and_each_held_by_the_ranks_that_have_it(parallel: int) -> None:
    ranks = shared(8, expert_parallel=parallel)
    local = replace(MOE, experts=MOE.experts // parallel)
    rows = [f"{stack}.{index}.mlp.experts" for stack in ("encoder", "decoder") for index in range(2)]
    sent = dict.fromkeys(rows, 7)
    plan = make_plan(
        module_spec(local), STATES["bf16"], Budgets(LARGE, LARGE), Options(), ranks, of_tokens(sent, ranks)
    )
    mixed = [u for u in plan.units if len({".experts." in slot.param.name for slot in u.slots}) > 1]
    assert not mixed
    for unit in plan.units:
        of_experts = ".experts." in unit.slots[0].param.name
        assert plan.layout.group(unit) == (8 // parallel if of_experts else 8)
    exchanges = [exchange.sent for of_tick in exchanges_at(plan).values() for exchange in of_tick]
    assert len(exchanges) == 2 * 2 * len(rows)  # there and back, in forward and backward
    timeline = simulate(plan, NODE, [1e-6] * (len(plan.trace.accesses) - 1))
    tokens = [span.nbytes for span in timeline.spans if span.name.startswith("tokens")]
    assert tokens == exchanges
