"""An engine without a model: gradients come from the test, over units of any sizes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from pagoda.construction.construct import describe, live_units
from pagoda.distributed.mesh import Mesh
from pagoda.distributed.stages import Links
from pagoda.distributed.world import World
from pagoda.optim import AdamW
from pagoda.plan.layout import BLOCK_ELEMENTS, GRAD, RING_SLOTS
from pagoda.plan.ops import HOST, SSD
from pagoda.plan.options import Options
from pagoda.plan.placement import CHECKPOINT, LEASES, RING, STAGING, Budgets, Placement
from pagoda.plan.planner import Plan, make_plan
from pagoda.plan.ranks import Ranks
from pagoda.runtime.device import Device
from pagoda.runtime.engine import Engine
from pagoda.runtime.loss_scale import LossScaler
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit
from pagoda.runtime.updates import Update
from pagoda.schedule.scheduler import Scheduler

PAGE = 4096
LARGE = 1 << 40
RESIDENT, SHARED, MOMENTS_ON_SSD, ALL_ON_SSD = "resident", "shared buffers", "moments_on_ssd", "all_on_ssd"
"""All in RAM, without or with gradients that share buffers; on SSD, but for weights or all of it."""

Sizes = Sequence[Sequence[int]]
"""Elements of each trainable parameter of each unit; a negative number is a frozen parameter."""

Seen = dict[tuple[int, int], torch.Tensor]
"""(unit, slot) -> a gradient, as an update saw it."""


@dataclass
class Parts:
    """The engine, and what a test tells it."""

    engine: Engine

    @property
    def store(self) -> Store:
        return self.engine.store

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    def units(self) -> list[LiveUnit]:
        return self.engine.units

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and gradients."""
        return self.store.dtype(GRAD)

    def random_gradient(self, unit: LiveUnit, slot: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * unit.index + slot)
        return torch.randn(unit.params[slot].shape, generator=generator).to(self.dtype)

    def deliver(self, unit: LiveUnit, slot: int, grad: torch.Tensor, accumulate: bool = False) -> None:
        """Autograd has finished one parameter's gradient."""
        unit.used = True
        unit.params[slot].grad = unit.markers[slot]
        unit.marked.add(slot)
        self.engine.stepper.on_gradient(unit, slot, grad, accumulate)

    def arrive(self, unit: LiveUnit, seed: int = 0, accumulate: bool = False, slots: Sequence[int] = ()) -> None:
        """Backward uses a unit, and makes gradients: of all its trainable parameters if not of some, last one first."""
        self.engine.accesses.read(unit)
        for slot in reversed(slots or range(unit.trainable)):
            self.deliver(unit, slot, self.random_gradient(unit, slot, seed), accumulate)

    def settle(self) -> None:
        """Wait until nothing is under way."""
        self.engine.accesses.wait_until_idle()

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.stepper.zero_grad()

    def only_look(self) -> Seen:
        """From now on, updates change nothing: they note the gradients that they see here."""
        seen: Seen = {}

        def feed(update: Update) -> None:
            for record, _ in update.pieces:
                for slot in range(update.unit.trainable):
                    placed = update.unit.spec.slots[slot]
                    of_slot = record.buffer[placed.offset : placed.offset + placed.param.numel]
                    seen[update.unit.index, slot] = of_slot.clone()
            update.used()
            update.updated.finish()
            update.written.finish()

        self.engine._executor.updaters[0].feed = feed
        return seen

    def see_all(self) -> Seen:
        """The gradients that the updates of a step see."""
        seen = self.only_look()
        self.step()
        self.engine.drain()
        return seen


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


def plan_for(model: nn.Module, placement: str, staged_units: int, block_limit: int) -> Plan:
    """One unit for each layer, with every home where the placement says."""
    states = AdamW().states("bf16")
    plan = make_plan(describe(model), states, Budgets(LARGE), Options(page_bytes=PAGE, unit_limit=1))
    plan = replace(plan, layout=replace(plan.layout, block_limit=block_limit))
    on_ssd = {
        RESIDENT: [],
        SHARED: [],
        MOMENTS_ON_SSD: [*(state.name for state in states[1:]), GRAD],
        ALL_ON_SSD: [*(state.name for state in states), GRAD],
    }[placement]
    names = [*(state.name for state in states), GRAD]
    homes = {(u.index, name): SSD if name in on_ssd else HOST for u in plan.units for name in names}
    pages = {name: plan.layout.total_pages(name) for name in names}
    host = {name: pages[name] for name in names if name not in on_ssd}
    if placement == SHARED:
        del host[GRAD]
    if placement != RESIDENT:
        host[STAGING] = staged_units * max(plan.layout.pages(unit, GRAD) for unit in plan.units)
    if on_ssd:
        host[RING] = RING_SLOTS * sum(plan.layout.block_pages(name) for name in on_ssd if name != GRAD)
    if placement == ALL_ON_SSD:
        host[LEASES] = 2 * max(plan.layout.lease_of(unit) for unit in plan.units)
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
    block_limit: int = BLOCK_ELEMENTS,
) -> Iterator[Parts]:
    """Everything but hooks; `staged_units` gradients of the widest unit fit into shared buffers at once."""
    model = layers_of(sizes)
    plan = plan_for(model, placement, staged_units, block_limit)
    rule = AdamW(lr=1e-2, weight_decay=0.1)
    units = live_units(model, plan.units, torch.bfloat16, Device.torch_device)
    for unit in units:
        unit.markers = [torch.empty(unit.params[slot].shape) for slot in range(unit.trainable)]
    alone = Links.open(Mesh(World(), Ranks(1, 1)))
    engine = Engine(plan, units, "bf16", rule, {directory: None}, None, True, Device(), LossScaler(None), alone)
    group = rule.defaults()
    engine.stepper.group_of = lambda unit, slot: group
    engine.stepper.groups = lambda: [group]
    try:
        yield Parts(engine)
    finally:
        engine.close()
