"""A policy of its own for each layer, by estimate: what `activations="auto"` of a run makes of the sizes it sees."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagoda.forecast.activations import estimate_sizes
from pagoda.forecast.compute import Compute
from pagoda.forecast.config import PlanConfig
from pagoda.forecast.machine import Machine, compute_memory
from pagoda.forecast.setting import Setting
from pagoda.memory.sizes import parse_bytes
from pagoda.plan.activations import (
    SHARE_OF_LANES,
    SHARE_OF_MEMORY,
    Policy,
    Room,
    SavedBlocks,
    StepSizes,
    choose,
)
from pagoda.plan.offloading import offload_room
from pagoda.plan.ops import DEVICE, HOST, SSD
from pagoda.plan.planner import Plan
from pagoda.plan.units import ModuleSpec, is_within, layers_of
from pagoda.simulate.rates import Rates


def mixed(config: PlanConfig, machine: Machine, setting: Setting) -> Setting:
    """The setting with the policies that fit beside its usual plan.

    Raises BudgetError where there is no plan.
    """
    plan = setting.usual_plan()
    sizes = _timed(estimate_sizes(setting.subject, config.tokens, setting.states[0].dtype.itemsize), setting)
    chosen = choose(sizes, _room(config, machine, setting, plan, sizes))
    times = spared(setting.from_flops, setting.subject.root, chosen.policies)
    return replace(setting, saved=SavedBlocks(sizes, chosen.policies), from_flops=times, compute=times)


def spared(times: Compute, root: ModuleSpec, policies: Sequence[Policy]) -> Compute:
    """Times of a model that is recomputed, less the forward that layers save that are not."""
    layers = zip(layers_of(root), policies, strict=True)
    kept = {layer.name for layer, policy in layers if not policy.recomputes}
    backward = {
        module: seconds - (times.forward_s.get(module, 0.0) if is_within(module, kept) else 0.0)
        for module, seconds in times.backward_s.items()
    }
    return Compute(times.forward_s, backward)


def _timed(sizes: StepSizes, setting: Setting) -> StepSizes:
    """The sizes with the seconds of each layer's forward."""
    forward = setting.from_flops.forward_s
    layers = layers_of(setting.subject.root)
    seconds = [sum(s for name, s in forward.items() if is_within(name, (layer.name,))) for layer in layers]
    blocks = tuple(replace(block, forward_s=s) for block, s in zip(sizes.blocks, seconds, strict=True))
    return replace(sizes, blocks=blocks)


def _room(config: PlanConfig, machine: Machine, setting: Setting, plan: Plan, sizes: StepSizes) -> Room:
    """What activations may take beside the pages of a plan, as a run finds it out."""
    separate = machine.hardware.device is not None
    pages = plan.peak_bytes.get(DEVICE, 0) + (0 if separate else plan.peak_bytes.get(HOST, 0))
    kept = int((compute_memory(machine) - pages) * SHARE_OF_MEMORY)
    if config.memory.activations is not None:
        kept = parse_bytes(config.memory.activations, "memory.activations")
    room = offload_room(plan.layout, plan.placement, plan.budgets)
    movable = {tier: _movable(setting, sizes, lanes) for tier, lanes in _LANES.items() if room[tier]}
    return Room(max(0, kept), room[HOST], room[SSD], movable.get(HOST, 0.0), movable.get(SSD, 0.0))


_LANES: Mapping[str, tuple[str, str]] = {HOST: ("d2h", "h2d"), SSD: ("ssd_write", "ssd_read")}


def _movable(setting: Setting, sizes: StepSizes, lanes: tuple[str, str]) -> float:
    """Bytes that lanes move out in a forward, and back in a backward, which takes twice as long."""
    rates = Rates(setting.hardware, setting.ranks)
    out, back = (1 / rates.seconds(lane, 1) for lane in lanes)
    forward_s = SHARE_OF_LANES * sum(block.forward_s for block in sizes.blocks)
    return forward_s * min(out, 2 * back)
