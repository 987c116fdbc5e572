"""Degrees: what tensor-parallel ranks have of a model, what ranks send each other, and the search of the fastest."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.degrees import search_degrees
from pagoda.forecast.forecast import Forecast, forecast
from pagoda.forecast.machine import find_machine_for
from pagoda.forecast.model_description import describe_model
from pagoda.forecast.pipeline import PipelineForecast, forecast_pipeline
from pagoda.forecast.tensor_parallel import tensor_part_of
from pagoda.plan.exchanges import Exchange, of_stage, of_sums
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import layers_of
from pagoda.simulate.rates import Rates
from tests.plan.test_ranks import NODE, PER_NODE

GB = 10**9


def named(**settings: Any) -> PlanConfig:
    asked = {"model": "gpt-1b", "hardware": "v100-32gx8", "per_device_train_batch_size": 1, "max_length": 1024}
    asked |= {"plan": "usual", "precision": "bf16"}
    return PlanConfig(**{**asked, **settings})


# --- parts of tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("gpt-1b", 4), ("llama-8b", 8), ("llama-15m", 2)])
def test_ranks_together_have_every_matrix_once_and_do_its_flops(name: str, ranks: int) -> None:
    whole = describe_model(named(model=name, max_length=64))
    part = tensor_part_of(whole, ranks)
    divided = 0
    for before, after in zip(whole.root.walk(), part.root.walk(), strict=True):
        assert after.name == before.name
        if after.shard is None:
            assert after == before
        else:
            divided += before.numel
            assert (after.shard.shape, after.shard.ranks) == (before.shape, ranks)
            assert after.numel * ranks == before.numel
    matrices = [p for layer in layers_of(whole.root) for p in layer.walk() if len(p.shape) == 2]
    assert divided >= sum(param.numel for param in matrices)
    of_layers = sum(n for module, n in whole.forward_flops.items() if ".".join(module.split(".")[:-1]))
    saved = sum(whole.forward_flops.values()) - sum(part.forward_flops.values())
    assert 0.5 * of_layers < saved / (1 - 1 / ranks) <= of_layers * (1 + 1e-9)
    assert len(part.summed) == 2 * whole.layers
    assert tensor_part_of(whole, 1) is whole


@pytest.mark.parametrize(
    ("name", "ranks", "complaint"),
    [
        ("gpt-1b", 3, "does not divide the 16 heads"),
        ("gpt-6x64", 2, "nothing says how the layers of 'gpt-6x64' are divided"),
        ("t5-moe-15m", 2, "mixture of experts: use --expert-parallel"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, ranks: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        tensor_part_of(describe_model(named(model=name, max_length=64)), ranks)


def test_each_layer_adds_up_twice_in_each_of_three_passes() -> None:
    config = named(tensor_parallel=4, per_device_train_batch_size=2)
    made = forecast(config, find_machine_for(config))
    sums = [span for span in made.timeline.spans if span.name.startswith("sum ")]
    assert len(sums) == 2 * 20 * 3  # layers are recomputed
    nbytes = 2 * 2 * 1024 * 2048  # bf16, two sequences
    assert {span.nbytes for span in sums} == {2 * nbytes * 3 // 4}
    hardware = made.machine.hardware
    least = len(sums) * 2 * nbytes * 3 / 4 / hardware.intra_node_bytes_per_s.value
    assert sum(span.end_s - span.start_s for span in sums) == pytest.approx(least)
    assert made.tokens_per_step == 2 * 2 * 1024  # two groups of four ranks


def test_parameters_that_an_optimizer_takes_whole_are_stored_whole_and_their_gradients_gathered() -> None:
    whole, config = describe_model(named()), named(tensor_parallel=4, optim="muon")
    made, parts = (forecast(each, find_machine_for(each)) for each in (config, replace(config, optim="adamw")))
    assert made.described.params == whole.params
    assert made.described.forward_flops == parts.described.forward_flops
    gathers = [span for span in made.timeline.spans if span.name.startswith("gradients ")]
    matrices = {p.name: p.numel for layer in layers_of(whole.root) for p in layer.walk() if len(p.shape) == 2}
    assert sum(span.nbytes for span in gathers) == sum(2 * numel * 3 // 4 for numel in matrices.values())
    assert not [span for span in parts.timeline.spans if span.name.startswith("gradients ")]
    assert made.timeline.step_s > parts.timeline.step_s


def test_sums_of_ranks_on_several_nodes_share_the_network() -> None:
    (inside,) = of_sums(["m"], GB, Ranks(2, PER_NODE, tensor_parallel=4))
    (across,) = of_sums(["m"], GB, Ranks(2, PER_NODE, tensor_parallel=8))
    seconds = [Rates(NODE).exchange_seconds(each) for each in (inside, across)]
    assert seconds == pytest.approx([2 * GB * 3 / 4 / 1e11, 2 * GB / 2 / 1e10])  # each node sends its half twice


# --- stages -----------------------------------------------------------------------------------------------


def sent(stage: int, ranks: Ranks) -> list[Exchange]:
    return of_stage(GB, ranks, stage)


def test_stages_share_the_network_only_where_they_are_on_different_nodes() -> None:
    halves = Ranks(2, PER_NODE, pipeline_parallel=4)
    first, second, third, last = (sent(stage, halves) for stage in range(4))
    assert [len(each) for each in (first, second, third, last)] == [1, 2, 2, 1]
    crosses = [each.over_network > 0 for each in (*first, *second, *third, *last)]
    assert crosses == [False, False, True, True, False, False]
    assert [(each.forward, each.backward) for each in second] == [(1, 0), (0, 1)]
    assert Rates(NODE).exchange_seconds(first[0]) == pytest.approx(GB / 1e11)
    assert Rates(NODE).exchange_seconds(third[0]) == pytest.approx(2 * GB / 1e10)  # of two ranks
    nodes = Ranks(2 * PER_NODE, PER_NODE, pipeline_parallel=2)
    assert Rates(NODE).exchange_seconds(sent(0, nodes)[0]) == pytest.approx(PER_NODE * GB / 1e10)


def test_a_stage_takes_no_less_than_its_compute_and_what_it_hands_on() -> None:
    micro_batches = 3
    config = named(pipeline_parallel=4, gradient_accumulation_steps=micro_batches, max_length=512)
    made = forecast_pipeline(config, find_machine_for(config))
    hidden = 2 * 512 * 2048
    for number, stage in enumerate(made.stages):
        rate = stage.machine.hardware.intra_node_bytes_per_s
        borders = 1 if number in (0, 3) else 2
        sends = [span for span in stage.timeline.spans if span.name.startswith("send ")]
        assert len(sends) == borders * micro_batches
        by_hand = borders * hidden / rate.value
        assert sum(span.end_s - span.start_s for span in sends) == pytest.approx(micro_batches * by_hand)
        least = stage.problem.compute.step_s + by_hand
        assert stage.timeline.step_s >= micro_batches * least * (1 - 1e-9)
        assert stage.timeline.pass_s >= least * (1 - 1e-6)
    slowest = made.slowest.timeline.step_s
    assert slowest <= made.step_s <= slowest * (1 + 3.1 / micro_batches)


def test_stages_of_one_rank_hand_on_too() -> None:
    config = named(pipeline_parallel=8, gradient_accumulation_steps=2)
    made = forecast_pipeline(config, find_machine_for(config))
    assert all(stage.machine.ranks.count == 1 for stage in made.stages)
    assert all(any(span.name.startswith("send") for span in stage.timeline.spans) for stage in made.stages)


# --- the search -------------------------------------------------------------------------------------------

Made = Forecast | PipelineForecast


def planned(config: PlanConfig) -> Made | None:
    """What the flags of one way give; None where they are refused, or nothing fits."""
    try:
        machine = find_machine_for(config)
        made = forecast_pipeline(config, machine) if config.pipeline_parallel > 1 else forecast(config, machine)
    except ConfigError:
        return None
    fits = made.slowest.fits if isinstance(made, PipelineForecast) else made.fits
    return made if fits else None


SEARCHES = [
    (
        named(
            model="llama-15m",
            max_length=128,
            search_degrees=("tensor", "pipeline", "replicas"),
            gpus_per_node=2,
            gradient_accumulation_steps=2,
        ),
        2,
    ),
    pytest.param(
        named(search_degrees=("tensor", "pipeline", "replicas"), nodes=2, hardware="v100-32gx16", gpus_per_node=2),
        4,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        named(model="mixtral-15m", max_length=128, search_degrees=("expert", "pipeline", "tensor"), gpus_per_node=4),
        4,
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("config", "count"), SEARCHES, ids=lambda value: getattr(value, "model", None))
def test_the_search_finds_what_trying_every_way_finds(config: PlanConfig, count: int) -> None:
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    names = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "expert": "expert_parallel"}
    searched = [names.get(name, name) for name in config.search_degrees]
    plain = replace(config, search_degrees=())
    rates: dict[tuple[int, ...], float] = {}
    for degrees in product(sizes, repeat=len(searched)):
        asked = replace(plain, **dict(zip(searched, degrees, strict=True)))
        shared = asked.tensor_parallel * asked.pipeline_parallel
        made = planned(replace(asked, gradient_accumulation_steps=config.gradient_accumulation_steps * shared))
        if made is not None:
            rates[degrees] = made.tokens_per_s
    assert len(rates) > 2
    found, said = search_degrees(config)
    chosen = tuple(getattr(found, name) for name in searched)
    assert rates[chosen] == pytest.approx(max(rates.values()), rel=1e-9)
    made = planned(found)
    assert made.tokens_per_s == pytest.approx(rates[chosen])
    flags = f"--tensor-parallel {found.tensor_parallel} --pipeline-parallel {found.pipeline_parallel}"
    assert flags in said[0]
    assert f"--gradient-accumulation-steps {found.gradient_accumulation_steps}" in said[0]
