"""Gathered parameters: real tensors outside forward."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pagoda.errors import UsageError
from pagoda.models.hidden import HOME
from pagoda.plan.layout import WEIGHT
from pagoda.runtime.engine import Engine
from pagoda.runtime.store import LOW
from pagoda.runtime.unit import LiveUnit


class _Home:
    """Where a parameter lives. It does not keep the engine alive, as the model and the optimizer do."""

    def __init__(self, engine: Engine, unit: LiveUnit, slot: int) -> None:
        self._engine = weakref.ref(engine)
        self._unit = unit
        self._slot = slot

    def open(self) -> tuple[Engine, LiveUnit, int]:
        """Engine, unit and slot. Raises UsageError where model and optimizer have been dropped."""
        engine = self._engine()
        if engine is None:
            raise UsageError(
                f"{self._unit.name(self._slot)!r} has no weights any more: its model and optimizer were dropped. Keep "
                "one of them for as long as the parameter is used."
            )
        return engine, self._unit, self._slot

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.open()[0].__reduce_ex__(protocol)


def is_paged(param: nn.Parameter) -> bool:
    """True for a parameter of a wrapped model."""
    return hasattr(param, HOME)


def home_of(param: nn.Parameter) -> tuple[Engine, LiveUnit, int] | None:
    """Engine, unit and slot of a wrapped model's parameter; None for a parameter that Pagoda leaves alone."""
    home: _Home | None = getattr(param, HOME, None)
    return None if home is None else home.open()


def mark_homes(engine: Engine) -> None:
    """Let every managed parameter say where it lives, and hide it."""
    for unit in engine.units:
        unit.begin_hiding()
        for slot, param in enumerate(unit.params):
            setattr(param, HOME, _Home(engine, unit, slot))


@contextmanager
def gathered(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Inside the block, `params` (a module means all of its parameters) hold real tensors in their compute dtype.

    With `modify` what was written to them becomes the new weight when the block ends; elements left alone keep
    their full-precision master. Without it changes are dropped. RAM for a copy of `params` is used meanwhile;
    forwards of their modules are not possible inside the block. Parameters not managed by Pagoda are left alone.
    What is computed from them may be a part of the loss, such as a penalty: its graph keeps the copies.

    Raises UsageError inside the forward of a module that uses one of them.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, nn.Parameter):
        params = [params]
    homes = {id(param): home for param in params if (home := home_of(param)) is not None}
    taken: list[tuple[Engine, LiveUnit, int]] = []
    # Else graphs would keep the parameters themselves, and see placeholders later.
    packing = next((engine.graphs.packing for engine, _, _ in homes.values() if engine.graphs.packing.enter()), None)
    try:
        for engine, unit, slot in homes.values():
            if slot in unit.gathered:  # by a block around this one, which will release it
                continue
            engine.drain()
            if unit.active:
                raise UsageError(f"{unit.name(slot)!r} cannot be gathered while its module's forward is running.")
            placed = unit.spec.slots[slot]
            flat = engine.store.read(unit.index, WEIGHT, placed.offset, placed.param.numel)
            unit.set_part(slot, flat.view(placed.param.shape).to(engine.device.torch_device))
            unit.gathered.add(slot)
            unit.used |= torch.is_grad_enabled()
            taken.append((engine, unit, slot))
        yield
        if modify:
            for engine, unit, slot in homes.values():
                overwrite(engine, unit, slot, unit.part(slot))
    finally:
        if packing is not None:
            packing.leave()
        for _, unit, slot in taken:
            unit.gathered.discard(slot)
            unit.hide_slot(slot)


def overwrite(engine: Engine, unit: LiveUnit, slot: int, value: torch.Tensor) -> None:
    """Make `value` (any float dtype), of what this rank has of the parameter, its master weight.

    Elements whose compute-dtype value does not change keep their low half when `value` has no more precision.
    """
    store = engine.store
    placed = unit.spec.slots[slot]
    if tuple(value.shape) != placed.param.shape:
        raise UsageError(f"{unit.name(slot)!r} has shape {placed.param.shape}; {tuple(value.shape)} was written to it.")
    flat = value.detach().reshape(-1).cpu()
    keeps_low = flat.dtype == store.dtype(WEIGHT) and slot < unit.trainable and store.has_low
    with engine.overwriting():
        if keeps_low:
            old = store.read(unit.index, WEIGHT, placed.offset, flat.numel())
            low = store.read(unit.index, LOW, placed.offset, flat.numel())
            low.masked_fill_(old.view(torch.int16) != flat.view(torch.int16), 0)
            store.write(unit.index, WEIGHT, placed.offset, flat)
            store.write(unit.index, LOW, placed.offset, low)
        else:
            store.write_master(unit.spec, slot, flat)
        engine.weights_changed(unit)
