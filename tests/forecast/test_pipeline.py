"""Forecasts of pipelines: stages have the whole model together, and the slowest sets the pace."""

from dataclasses import replace

import pytest

from pagoda.config.memory import Memory
from pagoda.errors import ConfigError
from pagoda.forecast.activations import activations_of
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.forecast.pipeline import forecast_pipeline, stage_of
from pagoda.plan.ranks import Ranks

from .machines import SMALL, figure


def described(name: str) -> ModelDescription:
    return describe_model(PlanConfig(model=name, max_length=64, precision="bf16"))


@pytest.mark.parametrize(("name", "tied"), [("gpt-6x64", True), ("llama-8b", False)])
def test_stages_have_the_whole_model_together(name: str, tied: bool) -> None:
    whole = described(name)
    stages = [stage_of(whole, stage, 2) for stage in range(2)]
    again = sum(p.numel for module in whole.root.modules() for p in whole.root.walk() if p.name in module.tied)
    assert (again > 0) == tied
    assert sum(stage.params for stage in stages) == whole.root.numel + again
    assert sum(stage.layers for stage in stages) == whole.layers
    names = [{param.name for param in stage.root.walk()} for stage in stages]
    assert names[0].isdisjoint(names[1])
    assert all(not module.tied for stage in stages for module in stage.root.modules())
    first, second = stages
    assert {**first.forward_flops, **second.forward_flops} == dict(whole.forward_flops)
    assert first.forward_flops.keys().isdisjoint(second.forward_flops)
    asked = PlanConfig(model=name, max_length=64, precision="bf16", activations="keep")
    waiting, alone = (activations_of(asked, replace(first, at_once=n)).saved for n in (2, 1))
    assert waiting == 2 * alone


def config(micro_batches: int, **settings: object) -> PlanConfig:
    memory = Memory(host="60MiB", ssd="1GiB")
    shape = {"model": "gpt-6x64", "max_length": 64, "gradient_accumulation_steps": micro_batches, "memory": memory}
    return PlanConfig(**{**shape, "activations": "keep", "plan": "usual", "precision": "bf16", **settings})


def test_a_step_is_that_of_the_slowest_stage_and_the_bubble() -> None:
    hardware = replace(SMALL, intra_node_bytes_per_s=figure(1e10)).with_gpus(6)
    machine = Machine(hardware, here=False, ranks=Ranks(2, 6, pipeline_parallel=3))
    steps = []
    for micro_batches in (2, 8):
        made = forecast_pipeline(config(micro_batches, pipeline_parallel=3), machine)
        said = made.as_json()
        slowest = max(made.stages, key=lambda stage: stage.timeline.step_s)
        others = sum(stage.timeline.pass_s for stage in made.stages) - slowest.timeline.pass_s
        assert said["step_s"] == pytest.approx(slowest.timeline.step_s + others)
        assert said["bubble"] == pytest.approx(others / slowest.timeline.step_s)
        assert 0 < said["bubble"] < 2.1 / micro_batches
        assert said["tokens_per_s"] == pytest.approx(2 * 64 * micro_batches / said["step_s"])
        assert said["stages"][said["slowest"]]["step_s"] == slowest.timeline.step_s
        steps.append(said["step_s"] / micro_batches)
        assert any("`pagoda train` refuses a model that ties it" in note for note in made.slowest.notes)
    assert steps[1] < steps[0]


def test_what_has_no_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one row of as many layers"):
        stage_of(described("gpt-2x64"), 0, 3)
    with pytest.raises(ConfigError, match="not one row of as many layers"):
        stage_of(described("t5-58b"), 0, 2)
    with pytest.raises(ConfigError, match="--max-model"):
        config(1, model=None, max_model=True, pipeline_parallel=2)
