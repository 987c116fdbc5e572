"""A rule's states of single parameters, as torch's `state_dict` has them."""

from collections.abc import Mapping
from typing import Any

import torch

from pagoda.optim.rule import Rule, StateSpec
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


class RuleStates:
    """Reads and writes what a rule keeps of a parameter beside its weights, while no update is in flight.

    Writing what was read changes no bit.
    """

    def __init__(self, store: Store, rule: Rule) -> None:
        self._store = store
        self._rule = rule

    def read(self, unit: LiveUnit, slot: int) -> dict[str, Any]:
        """A parameter's entry in a torch `state_dict`; all are copies."""
        kept = {spec.name: self._read(unit, slot, spec) for spec in self._rule.own_states()}
        return self._rule.torch_state(unit.steps[slot], kept)

    def blank(self, unit: LiveUnit, slot: int) -> dict[str, Any]:
        """What `read` gives, with every tensor on meta."""
        shape = unit.spec.slots[slot].param.shape
        kept = {
            spec.name: torch.empty(spec.shape(shape), dtype=spec.dtype, device="meta")
            for spec in self._rule.own_states()
        }
        entry = self._rule.torch_state(unit.steps[slot], kept)
        return {
            name: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
            for name, value in entry.items()
        }

    def write(self, unit: LiveUnit, slot: int, state: Mapping[str, Any]) -> None:
        """Take over such an entry, of any float dtypes and on any device; an empty one is a fresh parameter's."""
        placed = unit.spec.slots[slot]
        unit.steps[slot] = self._rule.steps_in(state)
        kept = self._rule.kept_states(state, placed.param.name, placed.param.shape)
        for spec in self._rule.own_states():
            self._store.write(unit.index, spec.name, spec.elements(placed.offset), kept[spec.name].reshape(-1))

    def _read(self, unit: LiveUnit, slot: int, spec: StateSpec) -> torch.Tensor:
        placed = unit.spec.slots[slot]
        first, count = spec.elements(placed.offset), spec.elements(placed.param.numel)
        return self._store.read(unit.index, spec.name, first, count).view(spec.shape(placed.param.shape))
