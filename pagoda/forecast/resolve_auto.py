"""Chooses the settings that a configuration leaves open: the policy for activations, and into how many micro-batches
layers divide their batch. It compares simulated plans."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import get_args

from pagoda.config.training import ActivationMode
from pagoda.errors import ConfigError
from pagoda.forecast.activations import chunking_helps, sizes_of
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
    StepSizes,
    choose,
    offload_room,
)
from pagoda.plan.planner import Plan
from pagoda.plan.tiers import DEVICE, HOST
from pagoda.plan.tiles import tile_count
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.rates import Rates


def resolve_auto(
    config: PlanConfig, machine: Machine, described: ModelDescription, timed: bool = True
) -> tuple[PlanConfig, tuple[str, ...]]:
    """Returns `config` with every open setting chosen, and the reasons.

    Activations, by default: recompute, or recompute+offload if only that fits. With "auto": the policy whose default
    plan is fastest if all layers have it. If a policy per layer is faster still, the choice is "auto". Micro-batches:
    as few as keep matrix products at full speed and small, or more if no plan fits otherwise. Without `timed`, nothing
    is simulated: the first policy is chosen for which a plan fits.
    """
    closed = {each.activations: each for each in alternatives(config, machine, described)}
    if len(closed) == 1:
        (only,) = closed.values()
        return only, _said_of_tiles(config, only)
    if config.activations is None or not timed:
        fitting = (each for each in closed.values() if _step_s(each, machine, described, timed=False) < inf)
        first = next(fitting, closed["recompute"])
        offloads = config.activations is None and first.activations != "recompute"
        said = f"activations: {first.activations}, since recompute does not fit."
        return first, (*_said_of_tiles(config, first), *[said] * offloads)
    closed["auto"] = replace(closed["recompute"], activations="auto")
    seconds = {mode: _step_s(each, machine, described) for mode, each in closed.items()}
    best = min(closed, key=lambda mode: round(seconds[mode], 9))  # the first of those that are equal but for rounding
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
    """The problem of a configuration without open settings, and where its budgets come from. With activations="auto",
    each layer has the policy that a run would choose for it.

    Raises the errors of `problem_of`, and BudgetError if layers have different policies and no plan fits.
    """
    problem, notes = problem_of(config, machine, described)
    if config.activations == "auto":
        plan = problem.plan()
        sizes = _timed(sizes_of(config, described), problem)
        saved = choose(sizes, _room(config, machine, problem, plan, sizes))
        compute = without_recomputing(problem.compute, problem.root, saved.policies)
        problem = replace(problem, saved=saved, compute=compute)
    return problem, notes


def alternatives(config: PlanConfig, machine: Machine, described: ModelDescription) -> list[PlanConfig]:
    """Every way to choose the open settings of `config` with one policy for all layers."""
    modes: tuple[ActivationMode, ...] = ("recompute", "recompute+offload")
    if config.activations == "auto":
        modes = tuple(m for m in get_args(ActivationMode) if m != "auto")
    elif config.activations is not None:
        modes = (config.activations,)
    if "auto" in (config.activations, config.batch_tiles) and config.chunked_loss is None:
        # Chunks change rounding. So only the request decides whether the loss is chunked, as in a run.
        config = replace(config, chunked_loss=chunking_helps(config, described))
    return [_with_tiles(replace(config, activations=mode), machine, described) for mode in modes]


def without_recomputing(times: Compute, root: ModuleSpec, policies: Sequence[Policy]) -> Compute:
    """Compute times without the second forward of the layers whose policy needs none."""
    layers = zip(layers_of(root), policies, strict=True)
    kept = {layer.name for layer, policy in layers if not policy.recomputes}
    backward = {
        module: seconds - (times.forward_s.get(module, 0.0) if is_within(module, kept) else 0.0)
        for module, seconds in times.backward_s.items()
    }
    return Compute(times.forward_s, backward)


def _with_tiles(config: PlanConfig, machine: Machine, described: ModelDescription) -> PlanConfig:
    """Choose the number of micro-batches if it is open."""
    if config.batch_tiles != "auto":
        return config
    count = tile_count("auto", config.per_device_train_batch_size, config.tokens)
    while True:
        tried = replace(config, batch_tiles=count)
        if count == config.per_device_train_batch_size or _step_s(tried, machine, described, timed=False) < inf:
            return tried
        count = min(2 * count, config.per_device_train_batch_size)


def _said_of_tiles(config: PlanConfig, chosen: PlanConfig) -> tuple[str, ...]:
    if config.batch_tiles != "auto":
        return ()
    return (f"batch tiles: {chosen.batch_tiles}; a layer runs at most {chosen.tile_tokens:,} tokens at a time.",)


def _step_s(config: PlanConfig, machine: Machine, described: ModelDescription, timed: bool = True) -> float:
    """Seconds per step of the default plan, or 0 unless `timed`. Infinite if no plan fits or offloaded activations have
    no tier to go to."""
    try:
        problem, _ = resolved_problem(config, machine, described)
        plan = problem.plan()
    except ConfigError:
        return inf
    return problem.estimated(plan)[0] if timed else 0.0


def _timed(sizes: StepSizes, problem: Problem) -> StepSizes:
    """The sizes together with the seconds of each layer's forward."""
    forward, layers = problem.compute.forward_s, layers_of(problem.root)
    seconds = [sum(s for name, s in forward.items() if is_within(name, (layer.name,))) for layer in layers]
    blocks = tuple(replace(block, forward_s=s) for block, s in zip(sizes.blocks, seconds, strict=True))
    return replace(sizes, blocks=blocks)


def _room(config: PlanConfig, machine: Machine, problem: Problem, plan: Plan, sizes: StepSizes) -> Room:
    """Memory that activations may take in addition to a plan's pages, computed as in a run."""
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
