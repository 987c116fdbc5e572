"""Steps: Pagoda beside plain PyTorch, with few units on the device, in a limited device, and the largest models."""

import math
from dataclasses import replace

from gpu_suite.common import Figures, Machine, drawn_quickly, paged_figures, plain_step_s, release, throughput
from pagoda import AdamW, Split, plan_of
from pagoda.errors import BudgetError
from pagoda.optim.codecs import Moments
from training import LR, Paged

_LARGEST_STEPS = 5


def step(machine: Machine) -> Figures:
    """All states in RAM and few units on the device, beside the largest model that plain PyTorch holds there."""
    same = replace(machine.workload, layers=machine.plain_layers())
    plain = throughput(same, plain_step_s(machine, same))
    paged, shares = {}, {}
    for share in machine.sizes.device_shares:
        memory = machine.memory(machine.sizes.few, split=Split(device_update_share=share))
        figures = paged_figures(machine, same, memory)
        name = f"{share:.0%} of updates on the device"
        paged[name], shares[name] = figures, plain["step_s"] / figures["step_s"]  # type: ignore[operator]
    return {"layers": same.layers, "plain": plain, "paged": paged, "share_of_plain": shares}


def whole(machine: Machine) -> Figures:
    """The whole shape, more than plain PyTorch holds, in few units of device memory."""
    return paged_figures(machine, machine.workload, machine.memory(machine.sizes.few))


def limited(machine: Machine) -> Figures:
    """The shape in a limited device tier, beside itself in an ample one."""
    ample = paged_figures(machine, machine.workload, machine.memory(machine.sizes.ample))
    tight = paged_figures(machine, machine.workload, machine.memory(machine.sizes.limited))
    return {"ample": ample, "limited": tight, "share": ample["step_s"] / tight["step_s"]}  # type: ignore[operator]


def largest(machine: Machine) -> Figures:
    """The largest model with exact moments, whose states have their homes on all tiers: five steps, updated under
    backward, or why not."""
    return _trained(machine, machine.sizes.exact_parameters, "fp32")


def largest_8bit(machine: Machine) -> Figures:
    """The largest model with 8-bit moments."""
    return _trained(machine, machine.sizes.compressed_parameters, "8bit")


def _trained(machine: Machine, parameters: float, moments: Moments) -> Figures:
    load = replace(machine.workload, batch_size=1, clip=None, layers=machine.layers_for(parameters))
    ssd = None if machine.ssd is None else str(machine.ssd)
    try:
        with drawn_quickly():
            memory = machine.memory(machine.most_of_the_device(), ssd=ssd)
            paged = Paged(load, memory, rule=AdamW(lr=LR, moments=moments))
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
