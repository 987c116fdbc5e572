"""`model.state_dict()` and `model.load_state_dict()` on a wrapped model."""

import weakref
from typing import Any

import torch
from torch import nn

from pagoda.checkpoint.gathered import overwrite
from pagoda.errors import UsageError
from pagoda.plan.layout import WEIGHT
from pagoda.plan.units import Part
from pagoda.runtime.engine import Engine


class WeightStateDicts:
    """Hooks that put real weights into state dicts and take them from there.

    `state_dict()` copies weights to RAM in their compute dtype; tied names share one tensor, as they do in any
    model. `load_state_dict()` takes values at whatever precision they have, straight to the master.

    A parameter that is a DTensor has one in its place; of a plain value of the whole, each rank takes its part.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._homes = {id(p): (unit, slot) for unit in engine.units for slot, p in enumerate(unit.params)}
        self._copies: dict[tuple[int, int, int], weakref.ref[torch.Tensor]] = {}
        """(parameter, version, state dict) -> the copy made for it, for tied names."""
        self._wholes: dict[tuple[str, int, int], weakref.ref[torch.Tensor]] = {}
        """(parameter in tiles, their version, state dict) -> where their values are put together."""

        def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._fill(module, state_dict, prefix)  # torch marks the hook, which a bound method does not allow

        for module in model.modules():
            if any(id(p) in self._homes for p in module.parameters(recurse=False)):
                module.register_state_dict_post_hook(fill)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(self._take)  # type: ignore[no-untyped-call]
                module.register_load_state_dict_post_hook(self._hide)  # type: ignore[no-untyped-call]

    def _fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        self._engine.settle()
        self._copies = {key: ref for key, ref in self._copies.items() if ref() is not None}
        self._wholes = {key: ref for key, ref in self._wholes.items() if ref() is not None}
        for name, param in module.named_parameters(recurse=False):
            home = self._homes.get(id(param))
            if home is None or prefix + name not in state_dict or home[1] in home[0].gathered:
                continue
            unit, slot = home
            key = (id(param), unit.version, id(state_dict))
            known = self._copies.get(key)
            value = known() if known is not None else None
            if value is None:
                placed = unit.spec.slots[slot]
                value = self._engine.store.read(unit.index, WEIGHT, placed.offset, placed.param.numel)
                value = value.view(placed.param.shape)
                if placed.param.part is not None:
                    value = self._within_whole(placed.param.part, value, (unit.version, id(state_dict)))
                value = unit.as_param(slot, value)
                self._copies[key] = weakref.ref(value)
            state_dict[prefix + name] = value

    def _within_whole(self, part: Part, value: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
        """The values of a tile, as a view of its whole parameter: the tiled layer then shows that one."""
        known = self._wholes.get((part.whole, *key))
        whole = known() if known is not None else None
        if whole is None:
            whole = torch.empty(part.shape, dtype=value.dtype)
            self._wholes[(part.whole, *key)] = weakref.ref(whole)
        view = whole.view(-1)[part.start : part.start + value.numel()].view(value.shape)
        return view.copy_(value)

    def _take(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace paged parameters; leave assign out.")
        for name, param in module.named_parameters(recurse=False):
            home = self._homes.get(id(param))
            value = state_dict.get(prefix + name)
            if home is None or value is None or value.shape != param.shape:
                continue  # torch reports what is missing or has the wrong shape
            unit, slot = home
            part = unit.part_of(slot, value)
            overwrite(self._engine, unit, slot, part)
            # Takes the copy torch makes after this hook.
            unit.set_part(slot, torch.empty(part.shape, dtype=param.dtype))
            state_dict[prefix + name] = unit.as_param(slot, part)

    def _hide(self, module: nn.Module, _incompatible: Any) -> None:
        for param in module.parameters(recurse=False):
            home = self._homes.get(id(param))
            if home is not None:
                unit, slot = home
                unit.hide_slot(slot)
