"""Moments as tensors of fp32, whatever the optimizer keeps them in."""

import torch

from pagoda.optim.adamw import AdamW
from pagoda.optim.flat import decode_moment, encode_moment
from pagoda.runtime.store import Store
from pagoda.runtime.unit import LiveUnit


class MomentTensors:
    """Reads and writes single parameters' moments, named as torch names them, while no update is in flight.

    Writing what was read changes no bit.
    """

    def __init__(self, store: Store, rule: AdamW) -> None:
        self._store = store
        self._rule = rule

    def read(self, unit: LiveUnit, slot: int, moment: str) -> torch.Tensor:
        """A copy in fp32, of the parameter's shape."""
        placed = unit.spec.slots[slot]
        kept = [
            self._store.read(unit.index, s.name, s.elements(placed.offset), s.elements(placed.param.numel))
            for s in self._rule.states_of(moment)
        ]
        return decode_moment(moment, kept).view(placed.param.shape)

    def write(self, unit: LiveUnit, slot: int, moment: str, value: torch.Tensor) -> None:
        """Overwrite one with `value`, of the parameter's shape and any float dtype, on any device."""
        flat = value.detach().to("cpu", torch.float32).reshape(-1)
        states = self._rule.states_of(moment)
        for state, kept in zip(states, encode_moment(moment, flat, self._rule.moments), strict=True):
            self._store.write(unit.index, state.name, state.elements(unit.spec.slots[slot].offset), kept)
