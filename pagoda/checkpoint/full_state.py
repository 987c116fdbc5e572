"""The full state dict: a wrapped model's weights, also those of experts that other ranks have."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import nn

from pagoda.checkpoint.gathered import home_of
from pagoda.checkpoint.stateful import unpaged
from pagoda.errors import UsageError
from pagoda.plan.layout import WEIGHT
from pagoda.runtime.engine import Engine
from pagoda.runtime.unit import LiveUnit


def full_state_dict(model: nn.Module, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """What `model.state_dict()` of one rank with the whole model gives: weights in their compute dtype, and buffers.

    Of several ranks the first one gets it, the others nothing, unless `all_ranks`; as torch's
    `get_model_state_dict(full_state_dict=True, cpu_offload=True)`. Weights come parameter by parameter, so the other
    ranks hold one at a time, whole also where tensor-parallel ranks divide it. Where ranks divide experts, those of all
    are in it, by their numbers in the whole model:
    `model.load_state_dict(full, strict=False)` takes a rank's own from it.

    Every rank calls it at the same point of its program. Raises UsageError for a model that is not wrapped.
    """
    homes = [home for p in model.parameters() if (home := home_of(p)) is not None]
    if not homes:
        raise UsageError("This model is not wrapped: call pagoda.wrap(model, ...) first.")
    engine = homes[0][0]
    engine.settle()
    together = engine.together
    receivers = range(together.ranks if together is not None else 1)[: None if all_ranks else 1]
    keeps = together is None or together.rank in receivers
    found: dict[str, torch.Tensor] = {}
    by_rank = _places_by_rank(model, engine)
    for unit in engine.units:
        divided = together is not None and len(by_rank) > 1 and unit.index in engine.plan.layout.expert_units
        for slot, placed in enumerate(unit.spec.slots):
            mine = engine.store.read(unit.index, WEIGHT, placed.offset, placed.param.numel).view(placed.param.shape)
            form = unit.forms[slot]
            if form is not None:
                mine = form.around(mine).full_tensor().cpu()
            values: Sequence[torch.Tensor] = (mine,)
            if divided:
                assert together is not None
                values = together.of_every_part(f"the full state of {unit.index}, {slot}", mine, receivers)
            if not keeps:
                continue
            for places, value in zip(by_rank, values, strict=False):
                _put(found, places[unit.index][slot], value)
    return found | {name: value.detach().clone() for name, value in unpaged(model)} if keeps else {}


@dataclass(frozen=True)
class _Place:
    """Where a parameter of a rank goes in a full state dict."""

    names: list[str]
    """Of the whole parameter; a tied one has several."""
    start: int
    """Its first element there."""
    shape: list[int]
    """Of the whole."""


def _places_by_rank(model: nn.Module, engine: Engine) -> list[list[list[_Place]]]:
    """Of each rank that divides experts, or this one where none does: the places of every parameter, by unit and slot.

    Every rank asks for it at the same point of its program.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)

    def of(unit: LiveUnit, slot: int) -> _Place:
        part = unit.spec.slots[slot].param.part
        if part is None:
            return _Place(names[id(unit.params[slot])], 0, list(unit.params[slot].shape))
        return _Place([part.whole], part.start, list(part.shape))

    mine = [[of(unit, slot) for slot in range(len(unit.params))] for unit in engine.units]
    together = engine.together
    if together is None or together.parts == 1:
        return [mine]
    data = json.dumps([[asdict(place) for place in of_unit] for of_unit in mine]).encode()
    said = together.announce("the full state dict", data)[: together.parts]
    return [[[_Place(**place) for place in of_unit] for of_unit in json.loads(each)] for each in said]


def _put(found: dict[str, torch.Tensor], place: _Place, value: torch.Tensor) -> None:
    """Put a parameter where it belongs: a part of one into the whole."""
    if value.numel() == prod(place.shape):
        found.update(dict.fromkeys(place.names, value))
        return
    whole = found.setdefault(place.names[0], torch.empty(place.shape, dtype=value.dtype))
    whole.view(-1)[place.start : place.start + value.numel()] = value.reshape(-1)
