"""The page of the papers' tables is what the code gives, and its formulas are the papers'."""

import re
from dataclasses import replace

import pytest

import papers
from pagoda.models.papers import PAPER_SHAPES
from pagoda.schedule.served import hit_rate
from paper_tables.efficiency import efficiency, simulated_efficiency
from paper_tables.experiments import TEN_CACHE_SHAPES, sections, ten_cache
from paper_tables.largest import HOST_SHARE
from paper_tables.memory import pagoda_bytes, zero_bytes
from paper_tables.pinned import layout_of, sizes_of, wasted_by_pages, wasted_by_powers_of_two
from paper_tables.runs import Setup, fits, run


@pytest.mark.parametrize(
    ("params", "ranks", "stage", "gigabytes"),
    [(7.5e9, 64, 1, 31.4), (7.5e9, 64, 2, 16.6), (7.5e9, 64, 3, 1.88), (1e12, 1024, 3, 15.6), (7.5e9, 1, 1, 120)],
)
def test_zeros_formula_gives_zeros_table(params: float, ranks: int, stage: int, gigabytes: float) -> None:
    assert zero_bytes(params, ranks, stage) / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 64, 1024])
def test_a_ranks_plan_holds_zeros_formula_with_two_bytes_less(ranks: int, stage: int) -> None:
    params = PAPER_SHAPES["zero-7.5b"].params
    assert pagoda_bytes("zero-7.5b", ranks, stage) == pytest.approx(
        zero_bytes(params, ranks, stage, other=10), rel=0.025
    )


def test_pages_waste_little_pinned_memory_and_powers_of_two_much_more() -> None:
    for shape in TEN_CACHE_SHAPES[::2]:
        layout = layout_of(shape)
        sizes = sizes_of(layout)
        assert sum(sizes) == shape.params * 14
        assert 0 < wasted_by_pages(layout) < 0.02 * sum(sizes) < wasted_by_powers_of_two(sizes)
    assert wasted_by_powers_of_two([1, 4, 5, 1000]) == 3 + 24


@pytest.mark.parametrize(("bandwidth", "batch"), [(1e9, 4), (3e9, 16), (70e9, 1)])
def test_without_overlap_the_simulator_agrees_with_zero_infinitys_formula_and_overlap_beats_it(
    bandwidth: float, batch: int
) -> None:
    simulated, _, intensity = simulated_efficiency(bandwidth, batch, whole=True)
    assert simulated == pytest.approx(efficiency(intensity, bandwidth), rel=1e-3)
    simulated, _, intensity = simulated_efficiency(bandwidth, batch, whole=False)
    assert simulated > 1.1 * efficiency(intensity, bandwidth)


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert papers.PAGE.read_text() == papers.page(), "run `python benchmarks/papers.py` and look at what changed"


def test_with_gpu_memory_alone_every_unit_but_one_lives_there() -> None:
    made = run(PAPER_SHAPES["gpt-60b"], Setup(machine="v100-32gx16", nodes=4, gpu_alone=True))
    assert len(made.plan.placement.resident) == len(made.plan.units) - 1
    assert not fits(PAPER_SHAPES["gpt-60b"], Setup(machine="v100-32gx16", nodes=1, gpu_alone=True))


def test_more_tokens_a_step_hide_more_copies() -> None:
    few, many = (
        run(PAPER_SHAPES["gpt-6b"], Setup(machine="a100-40gx8", gpus=1, batch=batch, ram_gib=128)) for batch in (1, 32)
    )
    assert many.flop_per_s > 1.2 * few.flop_per_s
    assert hit_rate(many.timeline.access_counts) > hit_rate(few.timeline.access_counts)
    slow = few.at_pace(100 * few.step_s)
    assert hit_rate(slow.access_counts) > 0.9, "the same plan hides all copies if compute takes longer"


def test_experts_on_drives_take_the_time_in_which_the_drives_read_and_write_their_states() -> None:
    """However few FLOPs the experts have, and however long Python takes for each of them."""
    shape = replace(PAPER_SHAPES["t5-moe-1.2t"], layers=3, decoder_layers=3, experts=8 * 24)
    made = run(shape, Setup(machine="a100-40gx8", batch=16, experts=8, ssd=True, ram_gib=64))
    of_rank = replace(shape, experts=24).params
    in_memory = 64 * 2**30 * HOST_SHARE / 8 + made.problem.budgets.device
    on_drive = (12 + 2) * of_rank - in_memory
    assert on_drive > 20e9
    seconds = 2 * on_drive / (made.problem.hardware.ssd.both_bytes_per_s.value / 8)
    assert seconds <= made.step_s < 1.05 * seconds


@pytest.mark.slow
def test_the_page_has_the_cheapest_experiment_as_the_script_writes_it_and_the_plots() -> None:
    text = papers.EXPERIMENTS_PAGE.read_text()
    assert "\n".join(sections([ten_cache()])) in text, "run `python benchmarks/papers.py experiments` and look"
    assert all((papers.DOCS / name).exists() for name in re.findall(r"\((\S+\.png)\)", text))


@pytest.mark.slow
def test_the_page_of_experiments_is_what_the_script_writes() -> None:
    text, _ = papers.experiments_page()
    assert papers.EXPERIMENTS_PAGE.read_text() == text, "run `python benchmarks/papers.py experiments` and look"
