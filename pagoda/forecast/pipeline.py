"""The forecast of a pipeline: each stage is one of a part of the model, and the slowest sets the pace.

A step is that of the slowest stage, longer by the share (stages - 1) / micro-batches, in which stages wait for their
first micro-batch or after their last. What stages send each other is not counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pagoda.errors import ConfigError
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.forecast import Forecast, forecast
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import ModelDescription, describe_configured
from pagoda.plan.combinations import check_features, features
from pagoda.plan.options import Options
from pagoda.plan.units import ModuleSpec, is_within, layers_of


@dataclass(frozen=True)
class PipelineForecast:
    """What can be said of a pipeline before it runs."""

    stages: tuple[Forecast, ...]
    """Each with the budgets and the micro-batches of one rank of it."""

    @property
    def slowest(self) -> Forecast:
        """The stage that sets the pace; where some do not fit, the first of those."""
        unfit = (stage for stage in self.stages if not stage.fits)
        return next(unfit, None) or max(self.stages, key=lambda stage: stage.timeline.step_s)

    @property
    def bubble(self) -> float:
        """Share of the slowest stage's step that comes on top, as stages wait for each other."""
        return (len(self.stages) - 1) / self.slowest.config.accumulation_steps

    @property
    def step_s(self) -> float:
        return self.slowest.timeline.step_s * (1 + self.bubble)

    def as_json(self) -> dict[str, Any]:
        """The key `pipeline` that docs/plan.md describes."""
        slowest = self.slowest
        return {
            "stages": [
                {
                    "params": stage.described.params,
                    "fits": stage.fits,
                    "bytes": {tier: sum(lines.values()) for tier, lines in stage.bytes.items()} if stage.fits else {},
                    "step_s": stage.timeline.step_s if stage.fits else None,
                }
                for stage in self.stages
            ],
            "slowest": self.stages.index(slowest),
            "bubble": self.bubble,
            "step_s": self.step_s if slowest.fits else None,
            "tokens_per_s": slowest.tokens_per_step / self.step_s if slowest.fits else None,
        }


def forecast_pipeline(config: PlanConfig, machine: Machine) -> PipelineForecast:
    """Plan every stage of `config.model`. Raises ConfigError as `forecast`, and for a model that has no stages."""
    count, ranks = config.pipeline_parallel, machine.ranks
    assert ranks is not None, "a pipeline has several ranks"
    options = Options.of(config, config.memory)
    check_features(features(options, config.states, ranks, config.tile_limit is not None))
    described = describe_configured(config)
    if described.top_k and ranks.count > 1:
        raise ConfigError(
            f"--pipeline-parallel is {count}, so {ranks.count} ranks of a stage would share a mixture of experts, "
            "which does not work: use as many stages as ranks"
        )
    stages = []
    for stage in range(count):
        at_once = min(count - stage, config.accumulation_steps)
        part = replace(stage_of(described, stage, count), at_once=at_once)
        its_machine = machine if ranks.count > 1 else replace(machine, ranks=None)
        stages.append(forecast(config, its_machine, described=part))
    return PipelineForecast(tuple(stages))


def stage_of(described: ModelDescription, stage: int, count: int) -> ModelDescription:
    """What a stage has: its share of the layers, the first one also what comes before them, the last what comes after.

    A parameter that the last stage ties to one of the first, as heads do to embeddings, is its own there. Raises
    ConfigError for fewer layers than stages, and for an encoder-decoder.
    """
    layers = [layer.name for layer in layers_of(described.root)]
    if len(layers) < count or len({name.rpartition(".")[0] for name in layers}) > 1:
        raise ConfigError(
            f"--pipeline-parallel is {count}, and {described.name!r} is not one row of as many layers or more: choose "
            "fewer stages, or a decoder"
        )
    mine = layers[stage * len(layers) // count : (stage + 1) * len(layers) // count]
    owners = _owners(described.root, layers, stage, count, mine)
    shapes = {param.name: param for param in described.root.walk()}
    held = {param.name for module in described.root.modules() if owners[module.name] for param in module.params}

    def visit(module: ModuleSpec) -> ModuleSpec:
        children = tuple(visit(child) for child in module.children if _any_here(child, owners))
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


def _owners(root: ModuleSpec, layers: Sequence[str], stage: int, count: int, mine: Sequence[str]) -> dict[str, bool]:
    """Module -> whether this stage has what it holds itself."""
    found: dict[str, bool] = {}
    before = True
    for module in root.modules():
        in_layers = is_within(module.name, layers)
        before = before and not in_layers
        found[module.name] = is_within(module.name, mine) if in_layers else stage == (0 if before else count - 1)
    return found


def _any_here(module: ModuleSpec, owners: Mapping[str, bool]) -> bool:
    return any(owners[inside.name] for inside in module.modules())
