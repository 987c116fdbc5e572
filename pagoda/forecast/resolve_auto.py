"""What a configuration leaves to the plan, chosen by plans that are made and simulated: what becomes of activations,
and in how many micro-batches layers run their batch."""

from dataclasses import replace
from math import inf
from typing import get_args

from pagoda.config.training import ActivationMode
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.inputs import PlanInputs, inputs_of
from pagoda.forecast.machine import Machine
from pagoda.forecast.mixed import mixed
from pagoda.forecast.model_description import ModelDescription
from pagoda.plan.activations import recomputes
from pagoda.plan.batch_tiles import tile_count


def resolve_auto(
    config: PlanConfig, machine: Machine, described: ModelDescription
) -> tuple[PlanConfig, tuple[str, ...]]:
    """`config` with nothing left open, and why.

    Activations: the policy whose usual plan is fastest, the same for all layers; or, if that is faster still and `wrap`
    takes it, "auto", which means one of its own for each layer. Micro-batches: as few as keep products of matrices at
    full speed and small, or as many more as it takes for a plan to fit.
    """
    closed = {each.activations: each for each in alternatives(config, machine, described)}
    if len(closed) == 1:
        (only,) = closed.values()
        return only, _said_of_tiles(config, only)
    if config.expert_parallel == 1:  # ranks that divide experts recompute alike, as `wrap` says
        closed["auto"] = replace(closed["recompute"], activations="auto")
    seconds = {mode: _step_s(each, machine, described) for mode, each in closed.items()}
    best = min(closed, key=lambda mode: seconds[mode])
    if seconds[best] == inf:
        return closed["recompute"], ("activations: recompute; no policy fits.",)
    beside = ", ".join(
        f"{mode} does not fit" if seconds[mode] == inf else f"{mode} {seconds[mode] / seconds[best] - 1:+.1%}"
        for mode in closed
        if mode not in (best, "auto")
    )
    said = f"activations: {best}, whose usual plan is the fastest ({beside})."
    return closed[best], (*_said_of_tiles(config, closed[best]), said)


def inputs_with_policies(
    config: PlanConfig, machine: Machine, described: ModelDescription
) -> tuple[PlanInputs, tuple[str, ...]]:
    """The inputs of a configuration with nothing left open, and how its budgets were found.

    Raises as `inputs_of`; BudgetError also where policies differ between layers and there is no plan.
    """
    inputs, notes = inputs_of(config, machine, described)
    return (inputs if config.activations != "auto" else mixed(config, machine, inputs)), notes


def alternatives(config: PlanConfig, machine: Machine, described: ModelDescription) -> list[PlanConfig]:
    """`config` with nothing left open, in every way that has one policy for all layers."""
    modes = tuple(m for m in get_args(ActivationMode) if m != "auto")
    if config.activations != "auto":
        modes = (config.activations,)
    if "auto" in (config.activations, config.batch_tiles):
        config = _with_loss(config, described)
    return [_with_tiles(replace(config, activations=mode), machine, described) for mode in modes]


def _with_loss(config: PlanConfig, described: ModelDescription) -> PlanConfig:
    """Whether the loss is in chunks, which rounds, decided by what was asked for alone, as a run decides it."""
    if config.chunked_loss is not None:
        return config
    chunks = chunking_helps(
        described.hidden,
        described.ffn,
        described.vocab,
        config.tile_tokens,
        config.tokens,
        config.states[0].dtype.itemsize,
        recomputes(config.activations),
    )
    return replace(config, chunked_loss=chunks)


def _with_tiles(config: PlanConfig, machine: Machine, described: ModelDescription) -> PlanConfig:
    """The number of micro-batches chosen, if it is open."""
    if config.batch_tiles != "auto":
        return config
    count = tile_count("auto", config.batch_size, config.tokens)
    while True:
        tried = replace(config, batch_tiles=count)
        if count == config.batch_size or _usual(tried, machine, described) is not None:
            return tried
        count = min(2 * count, config.batch_size)


def _said_of_tiles(config: PlanConfig, chosen: PlanConfig) -> tuple[str, ...]:
    if config.batch_tiles != "auto":
        return ()
    return (f"batch tiles: {chosen.batch_tiles}; a layer runs at most {chosen.tile_tokens:,} tokens at a time.",)


def _step_s(config: PlanConfig, machine: Machine, described: ModelDescription) -> float:
    """Seconds of a step of the usual plan; infinite where there is none."""
    inputs = _usual(config, machine, described)
    if inputs is None:
        return inf
    return inputs.simulated(inputs.usual_plan()).step_s


def _usual(config: PlanConfig, machine: Machine, described: ModelDescription) -> PlanInputs | None:
    """The inputs, if a plan fits, and if activations that are to be offloaded have somewhere to go."""
    try:
        inputs, _ = inputs_with_policies(config, machine, described)
        inputs.usual_plan()
    except ConfigError:
        return None
    return inputs
