"""A rule's states of single parameters, as torch's `state_dict` has them."""

from collections.abc import Mapping
from typing import Any

import torch

from pagoda.errors import CheckpointError
from pagoda.optim.rule import Rule
from pagoda.plan.packed import Span
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
        """A parameter's entry in a torch `state_dict`; all are copies, and DTensors where the parameter is one."""
        shape = unit.spec.slots[slot].param.shape
        return {
            name: unit.as_param(slot, value) if isinstance(value, torch.Tensor) and value.shape == shape else value
            for name, value in self._rule.torch_state(unit.steps[slot], self._kept(unit, slot)).items()
        }

    def blank(self, unit: LiveUnit, slot: int) -> dict[str, Any]:
        """What `read` gives, with every tensor on meta."""
        return {
            name: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
            for name, value in self._rule.torch_state(unit.steps[slot], self._kept(unit, slot, blank=True)).items()
        }

    def check(self, unit: LiveUnit, slot: int, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for an entry of a parameter of another size."""
        param = unit.params[slot]
        for name, span in self._spans(unit, slot).items():
            value = state.get(name)
            sizes = (span.count, unit.spec.slots[slot].param.numel, param.numel())
            if isinstance(value, torch.Tensor) and value.numel() not in sizes:
                raise CheckpointError(
                    f"The state does not belong to this optimizer: {name!r} of {unit.name(slot)!r} has shape "
                    f"{tuple(value.shape)}, and the parameter {tuple(param.shape)}."
                )

    def write(self, unit: LiveUnit, slot: int, state: Mapping[str, Any]) -> None:
        """Take over such an entry, which `check` accepts, of any float dtypes and on any device; an empty one is a
        fresh parameter's.

        Of tensors that tensor-parallel ranks divide as the parameter, each takes its part.
        """
        param, form = unit.spec.slots[slot].param, unit.forms[slot]
        if form is not None:
            wholes = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == form.shape}
            state = {**state, **{key: unit.part_of(slot, value) for key, value in wholes.items()}}
        kept, steps = self._rule.kept_states(state, param.name, param.shape), self._rule.steps_in(state)
        unit.steps[slot] = steps
        for name, value in kept.items():
            span = self._spans(unit, slot)[name]
            self._store.write(unit.index, name, span.first, value.reshape(-1))

    def _kept(self, unit: LiveUnit, slot: int, blank: bool = False) -> dict[str, torch.Tensor]:
        """The rule's states of a parameter, in their shapes; with `blank`, on meta but for single numbers."""
        kept: dict[str, torch.Tensor] = {}
        for name, span in self._spans(unit, slot).items():
            if blank and span.shape:
                kept[name] = torch.empty(span.shape, dtype=self._store.dtype(name), device="meta")
            else:
                kept[name] = self._store.read(unit.index, name, span.first, span.count).view(span.shape)
        return kept

    def _spans(self, unit: LiveUnit, slot: int) -> dict[str, Span]:
        """Where the rule's states of a parameter lie."""
        layout = self._store.plan.layout
        spans = {state.name: layout.span(unit.spec, slot, state) for state in self._rule.own_states()}
        return {name: span for name, span in spans.items() if span is not None}
