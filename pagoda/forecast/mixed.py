"""A policy of its own for each layer, by estimate: what `activations="auto"` of a run makes of the sizes it sees."""

from collections.abc import Sequence
from dataclasses import replace

from pagoda.forecast.activations import estimate_sizes
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.inputs import PlanInputs
from pagoda.forecast.machine import Machine, compute_memory
from pagoda.plan.activations import (
    OFFLOAD_LANES,
    SHARE_OF_MEMORY,
    Policy,
    Room,
    SavedBlocks,
    StepSizes,
    choose,
)
from pagoda.plan.offloading import offload_room
from pagoda.plan.ops import DEVICE, HOST
from pagoda.plan.planner import Plan
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.rates import Rates


def mixed(config: PlanConfig, machine: Machine, inputs: PlanInputs) -> PlanInputs:
    """The inputs with the policies that fit beside its usual plan.

    Raises BudgetError where there is no plan.
    """
    plan = inputs.usual_plan()
    sizes = _timed(estimate_sizes(inputs.described, config.tokens, inputs.states[0].dtype.itemsize), inputs)
    chosen = choose(sizes, _room(config, machine, inputs, plan, sizes))
    times = spared(inputs.from_flops, inputs.described.root, chosen.policies)
    return replace(inputs, saved=SavedBlocks(sizes, chosen.policies), from_flops=times, compute=times)


def spared(times: Compute, root: ModuleSpec, policies: Sequence[Policy]) -> Compute:
    """Times of a model that is recomputed, less the forward that layers save that are not."""
    layers = zip(layers_of(root), policies, strict=True)
    kept = {layer.name for layer, policy in layers if not policy.recomputes}
    backward = {
        module: seconds - (times.forward_s.get(module, 0.0) if is_within(module, kept) else 0.0)
        for module, seconds in times.backward_s.items()
    }
    return Compute(times.forward_s, backward)


def _timed(sizes: StepSizes, inputs: PlanInputs) -> StepSizes:
    """The sizes with the seconds of each layer's forward."""
    forward = inputs.from_flops.forward_s
    layers = layers_of(inputs.described.root)
    seconds = [sum(s for name, s in forward.items() if is_within(name, (layer.name,))) for layer in layers]
    blocks = tuple(replace(block, forward_s=s) for block, s in zip(sizes.blocks, seconds, strict=True))
    return replace(sizes, blocks=blocks)


def _room(config: PlanConfig, machine: Machine, inputs: PlanInputs, plan: Plan, sizes: StepSizes) -> Room:
    """What activations may take beside the pages of a plan, as a run finds it out."""
    separate = machine.hardware.device is not None
    pages = plan.peak_bytes.get(DEVICE, 0) + (0 if separate else plan.peak_bytes.get(HOST, 0))
    kept = int((compute_memory(machine) - pages) * SHARE_OF_MEMORY)
    if config.memory.activation_bytes is not None:
        kept = config.memory.activation_bytes
    room = offload_room(plan.layout, plan.placement, plan.budgets)
    rates = Rates(inputs.hardware, inputs.ranks)
    by_tier = {}
    for tier, (out, back) in OFFLOAD_LANES.items():
        if room[tier]:
            by_tier[tier] = 1 / rates.seconds(out, 1), 1 / rates.seconds(back, 1)
    return Room.of_step(sizes, max(0, kept), room, by_tier)
