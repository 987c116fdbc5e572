"""Steps: Pagoda beside plain PyTorch, in a limited device, and the largest models."""

import math
from dataclasses import replace

from gpu_suite.common import Figures, Machine, paged_figures, plain_step_s, release, rule, throughput
from pagoda import plan_of
from pagoda.errors import BudgetError
from pagoda.optim.codecs import Moments
from training import Paged

_LARGEST_STEPS = 5


def step(machine: Machine) -> Figures:
    """All states in RAM and few units on the device, beside the largest model that plain PyTorch holds there; then the
    whole shape."""
    same = replace(machine.workload, layers=machine.plain_layers())
    plain = throughput(same, plain_step_s(machine, same))
    memory = machine.memory(machine.sizes.few)
    paged = paged_figures(machine, same, memory)
    return {
        "layers": same.layers,
        "plain": plain,
        "paged": paged,
        "share_of_plain": plain["step_s"] / paged["step_s"],  # type: ignore[operator]
        "whole_shape": paged_figures(machine, machine.workload, memory),
    }


def limited(machine: Machine) -> Figures:
    """The shape in a limited device tier, beside itself in an ample one."""
    ample = paged_figures(machine, machine.workload, machine.memory(machine.sizes.ample))
    tight = paged_figures(machine, machine.workload, machine.memory(machine.sizes.limited))
    return {"ample": ample, "limited": tight, "share": ample["step_s"] / tight["step_s"]}  # type: ignore[operator]


def largest(machine: Machine) -> Figures:
    """The largest models, with exact and with 8-bit moments, whose states have their homes on all tiers: five steps of
    each, updated under backward, or why not."""
    sizes = machine.sizes
    return {
        "exact": _trained(machine, sizes.exact_parameters, "fp32"),
        "8bit": _trained(machine, sizes.compressed_parameters, "8bit"),
    }


def _trained(machine: Machine, parameters: float, moments: Moments) -> Figures:
    load = replace(machine.workload, batch_size=1, clip=None, layers=machine.layers_for(parameters))
    ssd = None if machine.ssd is None else str(machine.ssd)
    try:
        paged = Paged(load, machine.memory(machine.most_of_the_device(), ssd=ssd), rule=rule(moments))
    except BudgetError as refused:
        release(machine)
        return {"refused": str(refused)}
    ids = next(load.batches(machine.device))  # the same batch every step, so that the loss falls
    losses, seconds = [], []
    try:
        for _ in range(_LARGEST_STEPS):
            start = machine.now()
            losses.append(float(paged.step(ids)))
            seconds.append(machine.now() - start)
        paged.optimizer.drain()
        stats, plan = paged.optimizer.stats, plan_of(paged.model)
        within = all(peak <= plan.peak_bytes[tier] for tier, peak in stats.peak_bytes.items())
    finally:
        paged.close()
        release(machine)
    return throughput(load, min(seconds)) | {
        "losses": losses,
        "falling": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
        "within_plan": within,
    }
