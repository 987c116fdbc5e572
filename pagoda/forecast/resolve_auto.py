"""What a configuration leaves to the plan, chosen by plans that are made and simulated: what becomes of activations,
and in how many micro-batches layers run their batch."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import get_args

from pagoda.config.training import ActivationMode
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps, estimate_sizes
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine
from pagoda.forecast.model_description import ModelDescription
from pagoda.forecast.problem import Problem, problem_of
from pagoda.plan.activations import (
    OFFLOAD_LANES,
    SHARE_OF_MEMORY,
    Policy,
    Room,
    SavedBlocks,
    StepSizes,
    choose,
    offload_room,
    recomputes,
)
from pagoda.plan.batch_tiles import tile_count
from pagoda.plan.ops import DEVICE, HOST
from pagoda.plan.planner import Plan
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.rates import Rates


def resolve_auto(
    config: PlanConfig, machine: Machine, described: ModelDescription
) -> tuple[PlanConfig, tuple[str, ...]]:
    """`config` with nothing left open, and why.

    Activations: the policy whose usual plan is fastest, the same for all layers; or, if that is faster still, "auto",
    which means one of its own for each layer. Micro-batches: as few as keep products of matrices at
    full speed and small, or as many more as it takes for a plan to fit.
    """
    closed = {each.activations: each for each in alternatives(config, machine, described)}
    if len(closed) == 1:
        (only,) = closed.values()
        return only, _said_of_tiles(config, only)
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


def resolved_problem(
    config: PlanConfig, machine: Machine, described: ModelDescription
) -> tuple[Problem, tuple[str, ...]]:
    """What a configuration with nothing left open asks for, and how its budgets were found. With activations="auto",
    each layer has the policy that a run would give it.

    Raises as `problem_of`; BudgetError also where policies differ between layers and there is no plan.
    """
    problem, notes = problem_of(config, machine, described)
    if config.activations == "auto":
        plan = problem.plan()
        sizes = _timed(estimate_sizes(described, config.tokens, config.itemsize), problem)
        policies = choose(sizes, _room(config, machine, problem, plan, sizes)).policies
        compute = without_recomputing(problem.compute, problem.root, policies)
        problem = replace(problem, saved=SavedBlocks(sizes, policies), compute=compute)
    return problem, notes


def alternatives(config: PlanConfig, machine: Machine, described: ModelDescription) -> list[PlanConfig]:
    """`config` with nothing left open, in every way that has one policy for all layers."""
    modes = tuple(m for m in get_args(ActivationMode) if m != "auto")
    if config.activations != "auto":
        modes = (config.activations,)
    if "auto" in (config.activations, config.batch_tiles) and config.chunked_loss is None:
        # Chunks round: whether there are any follows from what was asked for alone, as in a run.
        sizes = config.tile_tokens, config.tokens, config.itemsize
        config = replace(config, chunked_loss=chunking_helps(described, *sizes, recomputes(config.activations)))
    return [_with_tiles(replace(config, activations=mode), machine, described) for mode in modes]


def without_recomputing(times: Compute, root: ModuleSpec, policies: Sequence[Policy]) -> Compute:
    """Times of a model that is recomputed, less the second forward of the layers whose policy needs none."""
    layers = zip(layers_of(root), policies, strict=True)
    kept = {layer.name for layer, policy in layers if not policy.recomputes}
    backward = {
        module: seconds - (times.forward_s.get(module, 0.0) if is_within(module, kept) else 0.0)
        for module, seconds in times.backward_s.items()
    }
    return Compute(times.forward_s, backward)


def _with_tiles(config: PlanConfig, machine: Machine, described: ModelDescription) -> PlanConfig:
    """The number of micro-batches chosen, if it is open."""
    if config.batch_tiles != "auto":
        return config
    count = tile_count("auto", config.batch_size, config.tokens)
    while True:
        tried = replace(config, batch_tiles=count)
        if count == config.batch_size or _step_s(tried, machine, described, timed=False) < inf:
            return tried
        count = min(2 * count, config.batch_size)


def _said_of_tiles(config: PlanConfig, chosen: PlanConfig) -> tuple[str, ...]:
    if config.batch_tiles != "auto":
        return ()
    return (f"batch tiles: {chosen.batch_tiles}; a layer runs at most {chosen.tile_tokens:,} tokens at a time.",)


def _step_s(config: PlanConfig, machine: Machine, described: ModelDescription, timed: bool = True) -> float:
    """Seconds of a step of the usual plan, or 0 unless they are `timed`. Infinite where no plan fits, or activations
    that are to be offloaded have nowhere to go."""
    try:
        problem, _ = resolved_problem(config, machine, described)
        plan = problem.plan()
    except ConfigError:
        return inf
    return problem.simulated(plan).step_s if timed else 0.0


def _timed(sizes: StepSizes, problem: Problem) -> StepSizes:
    """The sizes with the seconds of each layer's forward."""
    forward, layers = problem.compute.forward_s, layers_of(problem.root)
    seconds = [sum(s for name, s in forward.items() if is_within(name, (layer.name,))) for layer in layers]
    blocks = tuple(replace(block, forward_s=s) for block, s in zip(sizes.blocks, seconds, strict=True))
    return replace(sizes, blocks=blocks)


def _room(config: PlanConfig, machine: Machine, problem: Problem, plan: Plan, sizes: StepSizes) -> Room:
    """What activations may take in addition to the pages of a plan, as a run finds it out."""
    kept = config.memory.activation_bytes
    if kept is None:
        tiers = (DEVICE,) if machine.hardware.device is not None else (DEVICE, HOST)
        pages = sum(plan.peak_bytes.get(tier, 0) for tier in tiers)
        kept = max(0, int((machine.compute_memory - pages) * SHARE_OF_MEMORY))
    room = offload_room(plan.layout, plan.placement, plan.budgets)
    rates = Rates(problem.hardware, problem.ranks)
    by_tier = {
        tier: (1 / rates.seconds(out, 1), 1 / rates.seconds(back, 1))
        for tier, (out, back) in OFFLOAD_LANES.items()
        if room[tier]
    }
    return Room.of_step(sizes, kept, room, by_tier)
