"""Steps: Pagoda beside what no step beats and beside plain PyTorch, in several splits, and the largest models."""

import math
from collections.abc import Sequence
from dataclasses import replace

from gpu_suite.common import (
    Figures,
    Machine,
    Named,
    bounds,
    drawn_quickly,
    paged_figures,
    paged_runs,
    plain_step_s,
    release,
    throughput,
)
from pagoda import AdamW, Memory, Split, plan_of
from pagoda.config.run import Moments
from pagoda.errors import BudgetError
from training import LR, Paged, Workload

_LARGEST_STEPS = 5
_MICRO_BATCHES = 4


def homes(machine: Machine) -> Named:
    """The whole shape, half of which lives on the device, without clipping, beside its bound."""
    yield from _beside_bound(machine, replace(machine.workload, clip=None), _at_home(machine))


def homes_clipped(machine: Machine) -> Named:
    """The same with clipping."""
    return paged_runs(machine, machine.workload, _at_home(machine), machine.sizes.batch_sizes)


def few(machine: Machine) -> Named:
    """All states in RAM, few units on the device, without clipping, beside the bound of as many layers."""
    yield from _beside_bound(machine, replace(machine.in_ram, clip=None), machine.memory(machine.sizes.few))


def few_clipped(machine: Machine) -> Named:
    """The same with clipping."""
    return paged_runs(machine, machine.in_ram, machine.memory(machine.sizes.few), machine.sizes.batch_sizes)


def accumulation(machine: Machine) -> Named:
    """A step of one micro-batch and of four of the same size, with gradients in RAM; and what each of four takes over
    one alone."""
    seconds = {}
    for count in (1, _MICRO_BATCHES):
        load = replace(machine.in_ram, batch_size=count * machine.sizes.batch_size, micro_batches=count)
        figures = paged_figures(machine, load, machine.memory(machine.sizes.few))
        seconds[count] = figures["step_s"]
        yield f"{count} micro-batches", figures
    yield "share", seconds[_MICRO_BATCHES] / _MICRO_BATCHES / seconds[1]  # type: ignore[operator]


def step(machine: Machine) -> Named:
    """All states in RAM and few units on the device, beside the largest model that plain PyTorch holds there."""
    same = replace(machine.workload, layers=machine.plain_layers())
    plain = throughput(same, plain_step_s(machine, same))
    yield "layers", same.layers
    yield "plain", plain
    shares: Figures = {}
    for share in machine.sizes.device_shares:
        memory = machine.memory(machine.sizes.few, split=Split(device_update_share=share))
        figures = paged_figures(machine, same, memory)
        name = f"{share:.0%} of updates on the device"
        yield name, figures
        shares[name] = plain["step_s"] / figures["step_s"]  # type: ignore[operator]
    yield "share_of_plain", shares


def limited(machine: Machine) -> Named:
    """A model whose weights the device's pages do not hold, with 8-bit moments and without clipping, beside its
    bound."""
    load = replace(machine.workload, clip=None, layers=machine.layers_for(machine.sizes.limited_parameters))
    rule = AdamW(lr=LR, moments="8bit")
    yield from _beside_bound(machine, load, machine.memory(machine.sizes.limited), machine.sizes.batch_sizes[1:], rule)


def largest(machine: Machine) -> Named:
    """The largest model with exact moments, whose states have their homes on all tiers: five steps, updated under
    backward, or why not."""
    return _trained(machine, machine.sizes.exact_parameters, "fp32")


def largest_8bit(machine: Machine) -> Named:
    """The largest model with 8-bit moments."""
    return _trained(machine, machine.sizes.compressed_parameters, "8bit")


def _at_home(machine: Machine) -> Memory:
    sizes = machine.sizes
    return machine.memory(sizes.homes, sizes.homes_host, split=Split(device_home_share=1.0))


def _beside_bound(
    machine: Machine, load: Workload, memory: Memory, batch_sizes: Sequence[int] = (), rule: AdamW | None = None
) -> Named:
    sizes = batch_sizes or machine.sizes.batch_sizes
    least: dict[str, object] = {}
    for name, figures in bounds(machine, load, sizes):
        assert isinstance(figures, dict)
        least[name] = figures.get("step_s")
        yield name, figures
    for name, figures in paged_runs(machine, load, memory, sizes, rule):
        assert isinstance(figures, dict)
        bound = least.get(f"bound, {name}")
        yield name, figures | ({"share_of_bound": bound / figures["step_s"]} if bound and "step_s" in figures else {})


def _trained(machine: Machine, parameters: float, moments: Moments) -> Named:
    load = replace(machine.workload, batch_size=1, clip=None, layers=machine.layers_for(parameters))
    ssd = None if machine.ssd is None else str(machine.ssd)
    try:
        with drawn_quickly():
            memory = machine.memory(machine.most_of_the_device(), ssd=ssd)
            paged = Paged(load, memory, rule=AdamW(lr=LR, moments=moments))
    except BudgetError as refused:
        release(machine)
        yield "refused", str(refused)
        return
    ids = next(load.batches(machine.device))  # the same batch every step, so that the loss falls
    losses, seconds = [], []
    try:
        for _ in range(_LARGEST_STEPS):
            start = machine.now()
            losses.append(float(paged.step(ids)))
            seconds.append(machine.now() - start)
            yield "losses", losses
        paged.optimizer.synchronize()
        stats, plan = paged.optimizer.stats, plan_of(paged.model)
        yield "within_plan", all(peak <= plan.peak_bytes[tier] for tier, peak in stats.peak_bytes.items())
    finally:
        paged.close()
        release(machine)
    yield from throughput(load, min(seconds)).items()
    yield "falling", all(map(math.isfinite, losses)) and losses[-1] < losses[0]
