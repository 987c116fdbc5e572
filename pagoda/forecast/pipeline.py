"""Forecasts a pipeline. Each stage is forecast as a model of its own, and the slowest stage sets the pace.

A step takes as long as the slowest stage's step, including what it sends and receives, plus one micro-batch of each
other stage. For that long, the slowest stage waits for its first micro-batch, and the others continue after its last
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import Forecast, check_configured, forecast
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import ModelDescription, describe_model
from pagoda.models.stages import layers_of_stages
from pagoda.plan.combinations import check_experts_of_stages
from pagoda.plan.exchanges import of_stage
from pagoda.plan.ranks import Ranks
from pagoda.plan.units import ModuleSpec, is_within, layers_of


@dataclass(frozen=True)
class PipelineForecast:
    """The forecast of a pipeline."""

    stages: tuple[Forecast, ...]
    """For each stage, the forecast of one of its ranks, with that rank's budgets and micro-batches."""

    @property
    def slowest(self) -> Forecast:
        """The stage that sets the pace. If some stages do not fit, the first of these."""
        unfit = (stage for stage in self.stages if not stage.fits)
        return next(unfit, None) or max(self.stages, key=lambda stage: stage.timeline.step_s)

    @property
    def waiting_s(self) -> float:
        """Seconds per step, in addition to those of the slowest stage, in which stages wait for each other."""
        return sum(stage.timeline.pass_s for stage in self.stages) - self.slowest.timeline.pass_s

    @property
    def bubble(self) -> float:
        """`waiting_s` as a share of the slowest stage's step."""
        return self.waiting_s / self.slowest.timeline.step_s

    @property
    def step_s(self) -> float:
        return self.slowest.timeline.step_s + self.waiting_s

    @property
    def tokens_per_s(self) -> float:
        return self.slowest.tokens_per_step / self.step_s

    def as_json(self) -> dict[str, Any]:
        """The value of the key `pipeline` that docs/plan.md describes."""
        slowest = self.slowest
        return {
            "stages": [
                {
                    "params": stage.described.params,
                    "fits": stage.fits,
                    "bytes": dict(stage.plan.peak_bytes) if stage.fits else {},
                    "step_s": stage.timeline.step_s if stage.fits else None,
                }
                for stage in self.stages
            ],
            "slowest": self.stages.index(slowest),
            "bubble": self.bubble if slowest.fits else None,
            "step_s": self.step_s if slowest.fits else None,
            "tokens_per_s": self.tokens_per_s if slowest.fits else None,
        }


def forecast_pipeline(config: PlanConfig, machine: Machine) -> PipelineForecast:
    """Plan every stage of `config.model`. Raises ConfigError as `forecast` does, and for a model without stages."""
    check_configured(config)
    whole = describe_model(config)
    kinds, numbers = stages_of(config, machine.ranks, whole)
    made = [forecast(config, machine, described=part) for part in kinds]
    if tied := next((name for module in whole.root.modules() for name in module.tied), None):
        note = f"stages: the last one has a copy of {tied}, and `pagoda train` refuses a model that ties it."
        made = [replace(stage, notes=(*stage.notes, note)) for stage in made]
    return PipelineForecast(tuple(made[number] for number in numbers))


def stages_of(
    config: PlanConfig, ranks: Ranks, described: ModelDescription
) -> tuple[list[ModelDescription], list[int]]:
    """The part of the model that each kind of stage has, and the kind of each stage.

    Stages between the first and the last with equally many layers are of one kind. They are described as the first of
    them, which keeps the most activations. Raises ConfigError for a model without stages.
    """
    count = config.pipeline_parallel
    if described.top_k:
        check_experts_of_stages(ranks)
    handed_on = config.tokens * described.hidden * config.itemsize
    kinds: dict[tuple[int, bool, bool], int] = {}
    found: list[ModelDescription] = []
    numbers = []
    for stage in range(count):
        kind = len(_layers(described, stage, count)), stage == 0, stage == count - 1
        if kind not in kinds:
            kinds[kind] = len(found)
            at_once = min(count - stage, config.gradient_accumulation_steps)
            handed = tuple(of_stage(handed_on, ranks, stage))
            found.append(replace(stage_of(described, stage, count), at_once=at_once, handed_on=handed))
        numbers.append(kinds[kind])
    return found, numbers


def stage_of(described: ModelDescription, stage: int, count: int) -> ModelDescription:
    """The part of the model that a stage has: its share of the layers. The first stage also has everything before the
    layers, and the last stage everything after them.

    If the last stage ties a parameter to one of the first stage, as heads and embeddings do, it has its own copy.
    Raises ConfigError for fewer layers than stages, and for an encoder-decoder.
    """
    layers, mine = [layer.name for layer in layers_of(described.root)], _layers(described, stage, count)
    owners: dict[str, bool] = {}
    """Module -> whether this stage has the module's own parameters."""
    before = True
    for module in described.root.modules():
        in_layers = is_within(module.name, layers)
        before = before and not in_layers
        owners[module.name] = is_within(module.name, mine) if in_layers else stage == (0 if before else count - 1)
    shapes = {param.name: param for param in described.root.walk()}
    held = {param.name for module in described.root.modules() if owners[module.name] for param in module.params}

    def is_here(module: ModuleSpec) -> bool:
        return any(owners[inside.name] for inside in module.modules())

    def visit(module: ModuleSpec) -> ModuleSpec:
        children = tuple(map(visit, filter(is_here, module.children)))
        if not owners[module.name]:
            return replace(module, params=(), tied=(), children=children)
        untied = (replace(shapes[name], name=f"{module.name}.{name}") for name in module.tied if name not in held)
        tied = tuple(name for name in module.tied if name in held)
        return replace(module, params=(*module.params, *untied), tied=tied, children=children)

    def kept(by_module: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in by_module.items() if owners.get(name, stage == count - 1)}

    root = visit(described.root)
    return replace(
        described,
        name=f"stage {stage} of {described.name}",
        params=root.numel,
        root=root,
        forward_flops=kept(described.forward_flops),
        exchanged=kept(described.exchanged),
        layers=len(mine),
        vocab=described.vocab if stage == count - 1 else 0,
        measurable=False,
    )


def _layers(described: ModelDescription, stage: int, count: int) -> Sequence[str]:
    """Names of the layers of a stage, which are those that `pagoda train` gives it. Raises ConfigError as `stage_of`
    does."""
    root, layers = described.root, layers_of(described.root)
    if len(layers) < count or len({layer.name.rpartition(".")[0] for layer in layers}) > 1:
        raise ConfigError(
            f"--pipeline-parallel is {count}, and {described.name!r} is not one row of as many layers or more: choose "
            "fewer stages, or a decoder"
        )
    sizes, shapes = [layer.numel for layer in layers], {param.name: param for param in root.walk()}
    ahead = takewhile(lambda module: module.name != layers[0].name, root.modules())
    before = sum(param.numel for module in ahead for param in module.params)
    again = sum(shapes[name].numel for module in root.modules() for name in module.tied)
    after = root.numel - sum(sizes) - before + again
    return [layers[number].name for number in layers_of_stages(sizes, before, after, count)[stage]]
