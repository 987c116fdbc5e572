"""Activation policies: what they take, and which are chosen."""

from hypothesis import given, strategies as st

from pagoda.plan.activations import (
    BlockSizes,
    Policy,
    Room,
    StepSizes,
    Storages,
    bucket_of,
    choose,
    growth,
    peak_of,
    recomputed_s,
)

PAGE = 16


def storages(sizes: list[int]) -> Storages:
    total = Storages()
    for nbytes in sizes:
        total = total.with_one(nbytes, PAGE)
    return total


groups = st.lists(st.integers(1, 100), min_size=1, max_size=3).map(storages)
blocks = st.builds(BlockSizes, groups, groups, groups, st.floats(0.1, 10))
rooms = st.builds(
    Room,
    st.integers(0, 3000),
    st.sampled_from([0, 300, 10_000]),
    st.sampled_from([0, 300, 10_000]),
    st.sampled_from([0.0, 200.0, float("inf")]),
    st.sampled_from([0.0, 200.0, float("inf")]),
)


@st.composite
def steps(draw: st.DrawFn, alike: bool = False) -> StepSizes:
    count = draw(st.integers(1, 5))
    each = [draw(blocks)] * count if alike else [draw(blocks) for _ in range(count)]
    return StepSizes(tuple(each), tuple(draw(st.integers(0, 50)) for _ in range(count + 1)))


def fits(sizes: StepSizes, policies: tuple[Policy, ...], room: Room) -> bool:
    peak = peak_of(sizes, policies, room.host)
    return peak.kept <= room.kept and peak.ssd <= room.ssd


def in_time(sizes: StepSizes, policies: tuple[Policy, ...], room: Room) -> bool:
    """Whether lanes keep up with what is offloaded without being recomputed."""
    peak = peak_of(sizes, policies, room.host)
    return Policy.OFFLOAD not in policies or (peak.host <= room.movable_host and peak.ssd <= room.movable_ssd)


@given(steps(), rooms)
def test_a_choice_fits_wherever_recomputing_does_and_costs_no_more(sizes: StepSizes, room: Room) -> None:
    plan = choose(sizes, room)
    count = len(sizes.blocks)
    assert plan.peak == peak_of(sizes, plan.policies, room.host)
    for policy in (Policy.KEEP, Policy.RECOMPUTE):
        alone = (policy,) * count
        if fits(sizes, alone, room):
            assert fits(sizes, plan.policies, room)
            assert recomputed_s(sizes, plan.policies) <= recomputed_s(sizes, alone)
    if fits(sizes, (Policy.KEEP,) * count, room):
        assert set(plan.policies) == {Policy.KEEP}
    assert plan.peak.ssd <= room.ssd
    assert in_time(sizes, plan.policies, room)


def test_the_peak_is_the_sum_of_what_is_kept_and_of_one_block_that_is_recomputed() -> None:
    block = BlockSizes(inputs=Storages(10), saved_inputs=Storages(10), inner=Storages(90))
    sizes = StepSizes((block,) * 4, (1, 0, 0, 0, 7))
    assert peak_of(sizes, [Policy.KEEP] * 4).kept == 1 + 4 * 100 + 7
    assert peak_of(sizes, [Policy.RECOMPUTE] * 4).kept == 1 + 4 * 10 + 90
    assert peak_of(sizes, [Policy.RECOMPUTE] * 3 + [Policy.KEEP]).kept == 1 + 3 * 10 + 100 + 7
    large_head = StepSizes(sizes.blocks, (1, 0, 0, 0, 700))
    assert peak_of(large_head, [Policy.RECOMPUTE] * 4).kept == 1 + 4 * 10 + 700


@given(st.data())
def test_no_rank_takes_more_than_the_largest_sizes_of_all(data: st.DataObject) -> None:
    first = data.draw(steps())
    count = len(first.blocks)
    other = data.draw(steps().filter(lambda sizes: len(sizes.blocks) == count))
    policies = data.draw(st.lists(st.sampled_from(Policy), min_size=count, max_size=count))
    most = peak_of(StepSizes.most([first, other]), policies, host_room=300)
    for sizes in (first, other):
        assert peak_of(sizes, policies, host_room=300).or_more(most) == most


def test_ram_is_offloaded_to_first() -> None:
    block = BlockSizes(inner=storages([32, 32]))
    sizes = StepSizes((block,) * 4, (0,) * 5)
    peak = peak_of(sizes, [Policy.OFFLOAD] * 4, host_room=160)
    assert (peak.host, peak.ssd) == (160, 96)
    assert peak.kept == 4 * 32, "two on their way, two in use"


def test_the_last_blocks_are_kept_and_the_first_are_offloaded() -> None:
    block = BlockSizes(storages([16]), storages([16]), storages([32] * 8), 1.0)
    sizes = StepSizes((block,) * 6, (0,) * 7)
    plan = choose(sizes, Room(kept=1000, ssd=10_000, movable_ssd=600))
    assert plan.policies == (*[Policy.OFFLOAD] * 2, Policy.RECOMPUTE, *[Policy.KEEP] * 3)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=3))
def test_a_bucket_is_at_most_an_eighth_larger_than_what_is_in_it(shape: list[int]) -> None:
    ((*rounded,),) = bucket_of([shape])
    assert all(size <= above <= max(size, size * 9 / 8) for size, above in zip(shape, rounded, strict=True))
    assert bucket_of([rounded]) == bucket_of([shape])
    assert 1.0 <= growth([shape]) <= (9 / 8) ** 2
