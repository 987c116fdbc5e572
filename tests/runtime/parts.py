"""The parts of an engine without a model: units, a store, lanes and gradient extents over random sizes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from pagoda.memory import Arena, MemoryTier
from pagoda.memory.slabs import SlabRegion
from pagoda.optim import AdamW, Precision
from pagoda.optim.formats import gradient_kernels, update_kernel, warm_up
from pagoda.optim.kernels import UpdateKernel
from pagoda.optim.rule import gradient_dtype
from pagoda.plan.layout import BLOCK_ELEMENTS, GRAD, RING_SLOTS
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.placement import CHECKPOINT, RING, Budgets, Placement
from pagoda.plan.planner import Options, Plan, make_plan
from pagoda.runtime.construct import describe, live_units
from pagoda.runtime.device import Device
from pagoda.runtime.gradients import Gradients, UnitGradient
from pagoda.runtime.lanes import Lane
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit

PAGE = 4096
LARGE = 1 << 40
RESIDENT, MOMENTS_ON_SSD, ALL_ON_SSD = "resident", "moments_on_ssd", "all_on_ssd"

Sizes = Sequence[Sequence[int]]
"""Elements of each trainable parameter of each unit; a negative number is a frozen parameter."""


@dataclass
class Parts:
    """What a test of one part of the runtime needs."""

    plan: Plan
    store: Store
    units: list[LiveUnit]
    kernel: UpdateKernel
    lanes: dict[str, Lane]
    staging: SlabRegion
    gradients: Gradients
    stalls: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and gradients."""
        return self.store.dtype(GRAD)

    def bytes_moved(self, lane: str) -> int:
        return self.lanes[lane].take_counters()[1]

    def random_gradient(self, unit: LiveUnit, slot: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * unit.index + slot)
        return torch.randn(unit.params[slot].shape, generator=generator).to(self.dtype)

    def arrive(self, unit: LiveUnit, seed: int = 0, accumulate: bool = False) -> UnitGradient:
        """A gradient arrives for every trainable parameter of a unit, the last one first, as in backward."""
        for slot in reversed(range(unit.trainable)):
            record = self.gradients.add(unit, slot, self.random_gradient(unit, slot, seed), accumulate)
        return record

    def settle(self) -> None:
        """Wait until all that has arrived lies where it shall, and the lanes have told so."""
        for record in self.gradients.records():
            record.settle()
        for lane in ("d2h", "ssd_write", "ssd_read"):
            self.lanes[lane].submit(lambda: None).wait()


class _Layer(nn.Module):
    """Holds parameters of its own: without a forward, they would belong to the module around it."""

    def forward(self) -> None:
        raise AssertionError("nobody calls it")


def layers_of(sizes: Sizes) -> nn.Module:
    """A module with one layer for each entry of `sizes`, its parameters named p0, p1, …"""
    layers = nn.ModuleList(_Layer() for _ in sizes)
    for layer, of_layer in zip(layers, sizes, strict=True):
        for index, numel in enumerate(of_layer):
            layer.register_parameter(f"p{index}", nn.Parameter(torch.empty(abs(numel)), numel > 0))
    return nn.ModuleDict({"layers": layers})


def plan_for(model: nn.Module, placement: str, precision: Precision, options: Options, block_limit: int) -> Plan:
    """One unit for each layer, with every home where the placement says."""
    states = AdamW().states(precision)
    plan = make_plan(describe(model), states, Budgets(LARGE), options)
    plan = replace(plan, layout=replace(plan.layout, block_limit=block_limit))
    on_ssd = {
        RESIDENT: [],
        MOMENTS_ON_SSD: [*(state.name for state in states[1:]), GRAD],
        ALL_ON_SSD: [*(state.name for state in states), GRAD],
    }[placement]
    names = [*(state.name for state in states), GRAD]
    homes = {(u.index, name): SSD if name in on_ssd else HOST for u in plan.units for name in names}
    pages = {name: plan.layout.total_pages(name) for name in names}
    host = {name: pages[name] for name in names if name not in on_ssd}
    if on_ssd:
        host[RING] = RING_SLOTS * sum(plan.layout.block_pages(name) for name in on_ssd if name != GRAD)
    host[CHECKPOINT] = plan.layout.piece_pages
    lines = {HOST: host, SSD: {name: pages[name] for name in on_ssd}}
    slots = RING_SLOTS if on_ssd else 0
    placed = Placement(homes, {tier: of_tier for tier, of_tier in lines.items() if of_tier}, ring_slots=slots)
    return replace(plan, placement=placed, budgets=Budgets(LARGE, ssd=LARGE))


@contextmanager
def parts(
    directory: Path,
    sizes: Sizes,
    *,
    placement: str = ALL_ON_SSD,
    staged_units: int = 2,
    precision: Precision = "bf16",
    write_behind: bool = True,
    ssd_threads: int = 2,
    update_threads: int = 2,
    block_limit: int = BLOCK_ELEMENTS,
) -> Iterator[Parts]:
    """Everything but hooks and engine; `staged_units` gradients of the widest unit fit into staging at once."""
    warm_up(AdamW(), precision)
    model = layers_of(sizes)
    plan = plan_for(model, placement, precision, Options(page_bytes=PAGE, unit_limit=1), block_limit)
    store = Store(plan, {directory: None}, poison=True, device=Device())
    dtype = store.dtype(GRAD)
    units = live_units(model, plan.units, dtype, Device.torch_device)
    for unit in units:
        for param in unit.params:
            param.data = param.data.to(dtype)
    names = {"h2d": 1, "d2h": 1, "ssd_read": ssd_threads, "ssd_write": ssd_threads, "update": update_threads}
    lanes = {name: Lane(name, threads) for name, threads in names.items()}
    widest = max(plan.layout.pages(unit, GRAD) for unit in plan.units)
    memory = MemoryTier("staging", Arena(staged_units * widest * PAGE), PAGE, poison=True)
    staging = SlabRegion(memory, staged_units * widest, widest)
    stalls: list[str] = []
    kernel = update_kernel(AdamW(), precision)
    gradients = Gradients(
        store,
        staging,
        gradient_kernels(gradient_dtype(precision)),
        lanes,
        Device(),
        write_behind,
        lambda lane, seconds: stalls.append(lane),
    )
    try:
        yield Parts(plan, store, units, kernel, lanes, staging, gradients, stalls)
    finally:
        for lane in lanes.values():
            lane.close()
        store.close()
